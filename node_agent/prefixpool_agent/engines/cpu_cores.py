"""Which cores an engine's threads are bound to, as vLLM takes them: `0-3,6`, for each rank, `|` between. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from prefixpool.errors import SettingsError
from prefixpool_agent.engines.base import core_list

_WORDS: Final = frozenset({"auto", "nobind"})  # vLLM's own: choose by itself; leave it to the system
_RANGE: Final = re.compile(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", re.ASCII)


def checked(cores: str, available: tuple[int, ...], ranks: int) -> str:
    """The setting as it is. Raises SettingsError where vLLM would start and then fail, or crowd threads on other cores.

    `available`: cores that this process may use; `ranks`: processes that compute, at least.
    """
    if cores in _WORDS:
        return cores
    lists = cores.split("|")
    if len(lists) < ranks:
        raise SettingsError(f"cpu_cores={cores!r}: {ranks} lists of cores are needed, one for each device, with | between")
    missing = {core for one in lists for core in _cores(cores, one)} - set(available)
    if missing:
        which = ", ".join(map(str, sorted(missing)[:5])) + (", …" if len(missing) > 5 else "")
        raise SettingsError(f"cpu_cores={cores!r}: this process may use cores {core_list(available)}, not {which}")
    return cores


def _cores(setting: str, listed: str) -> Iterator[int]:
    for part in listed.split(","):
        found = _RANGE.fullmatch(part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if first > last:
            raise SettingsError(f"cpu_cores={setting!r}: expected cores as `0-1` or `0,2-3`, found {part!r}")
        yield from range(first, last + 1)
