"""Which tiers each arm has, and how large they are for a workload. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from prefixpool.api.engine import EngineKind
from prefixpool_cli.demo.capacity import CHARS_PER_TOKEN, estimated_working_set
from prefixpool_cli.demo.workload import Workload
from prefixpool_cli.errors import CliError

PRESSURE: Final = 4.0  # working set over the device tokens of one replica
HOST: Final = 2  # host memory as a multiple of the device: half of the work, so that the disk has something to add
DISK: Final = 12  # disk as a multiple of the device: all of the work, three times
REQUESTS: Final = 88  # four turns of every session
CONCURRENCY: Final = 2  # more prompts than that do not fit on the device at once
LENGTHS: Final = (1025, 4097)  # tokens of timed prompts: whole blocks, and the last token, which is always computed
SPARE_BLOCKS: Final = 32  # of a device that holds the longest of them


class SpillArm(NamedTuple):
    """One arm: its own pool, empty at first. `dies`: a replica is killed half-way, and comes back."""

    name: str
    host: bool = False
    disk: bool = False
    replicas: int = 1
    dies: bool = False

    @property
    def words(self) -> str:
        """For a person."""
        if self is TIMES:
            return f"prompts of {' and '.join(map(str, LENGTHS))} tokens, with the prefix in no tier and in each of them"
        tiers = ", ".join(("the device", *["host memory"] * self.host, *["disk"] * self.disk))
        more = f" on {self.replicas} replicas with one directory" if self.replicas > 1 else ""
        return tiers + more + (", one of which is killed half-way" if self.dies else "")


TIMES: Final = SpillArm("ttft", host=True, disk=True)  # no workload: single prompts, timed by where their prefix is
ALONE: Final = SpillArm("device")
ARMS: Final = (
    TIMES,
    ALONE,
    SpillArm("host", host=True),
    SpillArm("host_disk", host=True, disk=True),
    SpillArm("shared_restart", host=True, disk=True, replicas=2, dies=True),
)


class Sizes(NamedTuple):
    """Of one replica. `device_blocks`: the engine's null block included."""

    device_blocks: int
    max_model_len: int
    host_bytes: int
    disk_bytes: int


def arms(names: Sequence[str], engine: EngineKind) -> list[SpillArm]:
    """Those named, or all that this engine can run. Raises CliError for an arm that there is not, or that it cannot run."""
    known = {arm.name: arm for arm in ARMS}
    if unknown := sorted(set(names) - set(known)):
        raise CliError(f"no such arm: {', '.join(unknown)}", f"arms are {', '.join(known)}")
    chosen = [arm for arm in ARMS if not names or arm.name in names]
    if engine is EngineKind.SIM:
        if TIMES.name in names:
            raise CliError(f"the sim's times are made up: {TIMES.name} needs --engine vllm")
        chosen = [arm for arm in chosen if arm is not TIMES]
    if chosen == [TIMES]:
        raise CliError(f"{TIMES.name} sends no workload", "name another arm beside it")
    return chosen


def sizes(workload: Workload, engine: EngineKind, block_tokens: int, token_bytes: int, longest: int) -> Sizes:
    """`token_bytes`: KV of one token. `longest`: the most tokens that a request may have, if the device holds so many."""
    blocks = round(estimated_working_set(workload, CHARS_PER_TOKEN[engine]) / PRESSURE / block_tokens)
    return _sizes(blocks, block_tokens, token_bytes, longest)


def timed_sizes(block_tokens: int, token_bytes: int) -> Sizes:
    """For the arm TIMES: the longest prompt fits, and twice into host memory."""
    blocks = max(LENGTHS) // block_tokens + SPARE_BLOCKS
    return _sizes(blocks, block_tokens, token_bytes, blocks * block_tokens)


def worker_args(arm: SpillArm, size: Sizes, folder: str) -> tuple[str, ...]:
    """What a worker is told of the tiers below its device."""
    host = (f"--host-kv-bytes={size.host_bytes}",) if arm.host else ()
    disk = (f"--disk-kv-dir={folder}", f"--disk-kv-bytes={size.disk_bytes}") if arm.disk else ()
    shared = ("--disk-kv-shared=true",) if arm.disk and arm.replicas > 1 else ()
    return (*host, *disk, *shared)


def _sizes(blocks: int, block_tokens: int, token_bytes: int, longest: int) -> Sizes:
    device_tokens = blocks * block_tokens
    return Sizes(
        device_blocks=blocks + 1,
        max_model_len=min(longest, device_tokens),
        host_bytes=HOST * device_tokens * token_bytes,
        disk_bytes=DISK * device_tokens * token_bytes,
    )
