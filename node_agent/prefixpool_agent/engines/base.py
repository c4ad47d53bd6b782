"""What every engine adapter produces: a process to start, and facts once it runs. Pure data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple


class Host(NamedTuple):
    """What an adapter must know of the machine; gathered by the worker, so that adapters stay pure."""

    python: str  # interpreter that has the engine installed
    cores: tuple[int, ...]  # that this process may use
    weight_bytes: int | None  # of the model's files; None: not a folder, the engine will download it
    shm_bytes: int | None = None  # free in /dev/shm; None: not known


class EngineSpec(NamedTuple):
    """One engine process. `env` is added to the worker's own; the supervisor adds the epoch."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    url: str  # base URL, without a path
    served_model_name: str
    block_tokens: int  # 0: its own choice
    startup_timeout_s: float


class EngineFacts(NamedTuple):
    """What a running engine says of itself."""

    block_tokens: int
    device_blocks: int  # usable ones: without the null block
    version: str
    models: tuple[str, ...]

    @property
    def device_tokens(self) -> int:
        return self.block_tokens * self.device_blocks


class DeadlineRates(NamedTuple):
    """How long a start may take: generous, because a start that is cut off begins again from nothing."""

    base_s: float
    bytes_per_s: float
    download_s: float = 3600.0  # unknown size: the engine has to fetch the model first


def startup_deadline_s(weight_bytes: int | None, rates: DeadlineRates) -> float:
    """Seconds until an engine must have answered."""
    if weight_bytes is None:
        return rates.base_s + rates.download_s
    return rates.base_s + math.ceil(weight_bytes / rates.bytes_per_s)


def core_list(cores: tuple[int, ...]) -> str:
    """(0, 1, 2, 5) -> "0-2,5"."""
    ranges: list[list[int]] = []
    for core in sorted(set(cores)):
        if ranges and core == ranges[-1][1] + 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
