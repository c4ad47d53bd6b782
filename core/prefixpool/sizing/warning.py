"""What starts, but will not do what it is there for: said beside a plan, as data. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from prefixpool.sizing.reasons import gib
from prefixpool.sizing.tiers import HostLimits, HostNeeds, TierSize

LONGEST_PROMPTS: Final = 2  # that a host pool must hold: one is written or read while another comes up (vLLM drops it else)
NEARLY_ALL_PERCENT: Final = 95  # of a memory limit
_PAGE: Final = 4096  # the kernel cuts a limit to whole ones


class Hazard(StrEnum):
    """What may go wrong."""

    HOST_POOL_SMALL = "HostPoolSmall"  # prompts are computed again although they are on disk, or are not kept at all
    HOST_POOL_BELOW_DEVICE = "HostPoolBelowDevice"  # it holds copies of what the device holds, and little else
    DISK_BELOW_HOST = "DiskBelowHost"  # the same, one tier below
    MEMORY_LIMIT = "MemoryLimit"  # the engine's container may be killed
    SHARED_MEMORY = "SharedMemory"  # the engine does not start, or dies when its pool is touched


class SizingWarning(msgspec.Struct, frozen=True, kw_only=True):
    """One hazard, with the numbers, and what to change."""

    hazard: Hazard
    message: str  # one sentence


def of_tiers(
    device: TierSize, host: TierSize, disk: TierSize, prompt_blocks: int, host_bytes: int
) -> tuple[SizingWarning, ...]:
    """`prompt_blocks`: of the longest prompt. `host_bytes`: as asked for. A tier of no blocks is not there."""
    found: list[SizingWarning] = []
    if not host.blocks:
        words = f"The host pool of {gib(host_bytes)} holds not one block: there is no tier below the device."
        return (_warning(Hazard.HOST_POOL_SMALL, words),) if host_bytes else ()
    if host.blocks < LONGEST_PROMPTS * prompt_blocks:
        each = host.bytes // host.blocks
        least = gib(LONGEST_PROMPTS * prompt_blocks * each)
        words = f"The host pool of {gib(host.bytes)} is smaller than {LONGEST_PROMPTS} of the longest prompts ({least})"
        found.append(_warning(Hazard.HOST_POOL_SMALL, f"{words}: prompts are lost from it while they are moved."))
    elif host.blocks <= device.blocks:
        words = f"The host pool holds {host.tokens:,} tokens, no more than the device ({device.tokens:,})"
        found.append(
            _warning(Hazard.HOST_POOL_BELOW_DEVICE, f"{words}: as a copy of what is there it adds next to nothing.")
        )
    if disk.blocks and disk.blocks <= host.blocks:
        words = f"The disk holds {disk.tokens:,} tokens, no more than the host pool ({host.tokens:,})"
        found.append(_warning(Hazard.DISK_BELOW_HOST, f"{words}: it adds nothing but what outlives the engine."))
    return tuple(found)


def of_limits(needs: HostNeeds, limits: HostLimits, who: str) -> tuple[SizingWarning, ...]:
    """What a container gets against what the plan needs. `who`: the container, as a sentence begins."""
    found = []
    if 0 < limits.memory <= needs.memory - _PAGE:
        words = f"{who} may use {gib(limits.memory)} of memory, and {gib(needs.memory)} are planned"
        found.append(_warning(Hazard.MEMORY_LIMIT, f"{words}: it will be killed when its cache is full."))
    if 0 < limits.shared_memory <= needs.shared_memory - _PAGE:
        words = f"{who} has {gib(limits.shared_memory)} of /dev/shm, and {gib(needs.shared_memory)} are planned"
        found.append(_warning(Hazard.SHARED_MEMORY, f"{words}: mount a larger one."))
    return tuple(found)


def of_use(limit_bytes: int, used_bytes: int, who: str) -> tuple[SizingWarning, ...]:
    """What a container used at most, of what it may (0: no limit). The words do not change while it goes on."""
    if not limit_bytes or used_bytes * 100 < limit_bytes * NEARLY_ALL_PERCENT:
        return ()
    words = f"{who} has used more than {NEARLY_ALL_PERCENT} % of its memory limit ({gib(limit_bytes)})"
    return (_warning(Hazard.MEMORY_LIMIT, f"{words}: raise it, or lower kvCache."),)


def sentences(warnings: tuple[SizingWarning, ...]) -> str:
    """For people, one behind the other."""
    return " ".join(f"Warning: {one.message}" for one in warnings)


def _warning(hazard: Hazard, message: str) -> SizingWarning:
    return SizingWarning(hazard=hazard, message=message)
