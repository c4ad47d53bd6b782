"""KV outside of the device: host memory and disk.

vLLM's host pool is cut into chunks, each one block of all ranks rounded up to whole pages, and is touched at start, so the
container's memory limit must cover all of it. It is a file in shared memory, whose size limit must cover it too, with room
for the segments that vLLM keeps there besides. What lies on disk takes memory, too: engine and agent know each chunk.
"""

from __future__ import annotations

from typing import Final

import msgspec

from prefixpool.sizing.kv import KvLayout
from prefixpool.sizing.parallel import Parallel

_PAGE: Final = 4096
_SHARED_OVER_POOL_TENTHS: Final = 12  # for each 10 bytes of pool: with less, production pods were killed (kserve #1842)
# vLLM's and NCCL's own segments: 400 MB measured with one rank, rounded up. Ranks without a direct way to each other, as on
# cards without NVLink, meet in segments of 10 MB for each pair and channel; a segment that does not fit ends the engine.
_SHARED_PER_RANK: Final = 1 << 30
_PROCESS_BASE: Final = 6 << 30  # Python, torch, CUDA's host side, agent; weights pass through piecewise
_INPUTS: Final = 4 << 30  # vLLM's cache of images and the like, by default; a plan cannot tell which models take any
_PROCESS_PER_RANK: Final = 2 << 30  # with what further ranks keep in shared memory
# Of each chunk on disk, measured with 100,000 of them on CPython 3.11. The engine keeps its name, its size, and its place in
# the order of going: 700 bytes, and 100 more while it counts the directory. The agent keeps the file's name, and its block
# in the picture with tokens and boundaries: 800. (The picture is bounded, by 500,000 blocks; names are not.)
_CHUNK_ON_DISK: Final = 1600


class TierSize(msgspec.Struct, frozen=True, kw_only=True):
    """One tier of one replica. `tokens`: in the longest sequences the model takes."""

    bytes: int  # that hold KV
    blocks: int
    tokens: int


class HostNeeds(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Bytes that a pod must ask for."""

    shared_memory: int  # size limit of /dev/shm
    memory: int  # request and limit of the engine's container; pages in /dev/shm count towards it


class HostLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that an engine's container gets; 0: not limited, or not known."""

    memory: int = 0
    shared_memory: int = 0  # size of /dev/shm


def host_tier(layout: KvLayout, copies: int, pool_bytes: int, length: int) -> TierSize:
    """What vLLM's host pool of so many bytes holds. `copies`: `parallel.stored_copies`."""
    chunk = -(-layout.block_bytes * copies // _PAGE) * _PAGE
    return _tier(layout, pool_bytes // chunk, chunk, length)


def disk_tier(layout: KvLayout, copies: int, disk_bytes: int, length: int) -> TierSize:
    """What a directory of so many bytes holds: one file region of whole pages for each block of each worker."""
    chunk = -(-layout.block_bytes // _PAGE) * _PAGE * copies
    return _tier(layout, disk_bytes // chunk, chunk, length)


def _tier(layout: KvLayout, blocks: int, chunk: int, length: int) -> TierSize:
    return TierSize(bytes=blocks * chunk, blocks=blocks, tokens=layout.tokens(blocks, length))


def host_needs(parallel: Parallel, pool_bytes: int, disk_chunks: int, device_on_host: int) -> HostNeeds:
    """Limits for a pod. `device_on_host`: on CPUs, the memory that all of it takes but what the tiers below need."""
    pool = pool_bytes * _SHARED_OVER_POOL_TENTHS // 10
    tiers = pool + disk_chunks * _CHUNK_ON_DISK
    if device_on_host:
        return HostNeeds(shared_memory=_SHARED_PER_RANK + pool, memory=device_on_host + tiers)
    base = _PROCESS_BASE + _INPUTS + _SHARED_PER_RANK + _PROCESS_PER_RANK * (parallel.devices - 1)
    return HostNeeds(shared_memory=_SHARED_PER_RANK * parallel.devices + pool, memory=base + tiers)
