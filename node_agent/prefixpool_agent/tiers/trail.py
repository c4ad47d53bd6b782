"""Which chunk comes before which in a prompt, from the positions that vLLM notes for a request's keys. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

GROUP_BYTES: Final = 4  # at the end of a key: its KV group


class Place(NamedTuple):
    """Where in its prompt a chunk ends, and the chunk before it."""

    parent: bytes = b""  # empty: it begins a prompt, or is not known
    tokens: int = 0


class Trail:
    """Of one request. Chunks mostly come in order, so the parent of the next is the last one; else all are looked at."""

    def __init__(self) -> None:
        self._last: dict[bytes, tuple[int, bytes]] = {}  # KV group -> end, key

    def places(self, keys: Iterable[bytes], ends: Mapping[bytes, int]) -> dict[bytes, Place]:
        """`ends`: of all the request's keys, in tokens."""
        out = {}
        for key in sorted(keys, key=lambda key: ends.get(key, 0)):
            end, group = ends.get(key, 0), key[-GROUP_BYTES:]
            before = self._last.get(group)
            if before is None or before[0] >= end:
                before = _before(end, group, ends)
            out[key] = Place(before[1], end)
            self._last[group] = (end, key)
        return out


def _before(end: int, group: bytes, ends: Mapping[bytes, int]) -> tuple[int, bytes]:
    return max(((at, key) for key, at in ends.items() if at < end and key.endswith(group)), default=(0, b""))
