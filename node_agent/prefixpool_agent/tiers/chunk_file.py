"""One chunk of KV cache as a file: a head that says what it is, and the bytes. Pure.

    magic 8 | checksum 16 | namespace 16 | payload bytes u64 | tokens u32 | key length u8 | parent length u8 | 2 zeros
    | key 72 | parent 72 | payload                                                                   (little endian)

The checksum covers everything behind itself: a flipped bit, a file cut short or put under another's name is no chunk. It is
no defence against somebody who may write to the directory; such a person could as well change the model's weights.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final, NamedTuple

import mmh3

_LAYOUT: Final = struct.Struct("<16sQIBB2x72s72s")
_MAGIC: Final = b"PPCHUNK1"
_CHECKSUM_BYTES: Final = 16
HEAD_BYTES: Final = len(_MAGIC) + _CHECKSUM_BYTES + _LAYOUT.size
NAMESPACE_BYTES: Final = 16
_NAME_BYTES: Final = 72


class Head(NamedTuple):
    """What a chunk is. `key` and `parent` are the engine's: digest and KV group."""

    namespace: bytes  # which model, made how: chunks of another are never read
    key: bytes
    parent: bytes  # the chunk before it in its prompt; empty: it begins one, or is not known
    tokens: int  # where in the prompt it ends; 0: not known
    payload_bytes: int


class ChunkError(Exception):
    """Not the chunk that was asked for; the words say why."""


def encode(head: Head, payload: bytes | bytearray | memoryview) -> bytes:
    """What goes before the payload. Raises ValueError for names that are too long."""
    if max(len(head.key), len(head.parent)) > _NAME_BYTES or len(head.namespace) != NAMESPACE_BYTES:
        raise ValueError(
            f"a key of {len(head.key)} bytes in a namespace of {len(head.namespace)} does not fit a chunk's head"
        )
    rest = _LAYOUT.pack(
        head.namespace, head.payload_bytes, head.tokens, len(head.key), len(head.parent), head.key, head.parent
    )
    return _MAGIC + _checksum(rest, payload) + rest


def decode(data: bytes | bytearray | memoryview) -> Head:
    """The head alone, without a look at the payload. Raises ChunkError."""
    if len(data) < HEAD_BYTES or data[: len(_MAGIC)] != _MAGIC:
        raise ChunkError("no chunk's head")
    fields = _LAYOUT.unpack_from(data, len(_MAGIC) + _CHECKSUM_BYTES)
    namespace, payload_bytes, tokens, key_bytes, parent_bytes, key, parent = fields
    return Head(namespace, key[:key_bytes], parent[:parent_bytes], tokens, payload_bytes)


def verify(data: memoryview, namespace: bytes, key: bytes) -> memoryview:
    """The payload of a whole file. Raises ChunkError unless it is this chunk, and every bit as it was written."""
    head = decode(data)
    payload = data[HEAD_BYTES:]
    if len(payload) != head.payload_bytes:
        raise ChunkError(f"{len(payload)} bytes of {head.payload_bytes}")
    checksum_at = len(_MAGIC)
    rest_at = checksum_at + _CHECKSUM_BYTES
    if data[checksum_at:rest_at] != _checksum(data[rest_at:HEAD_BYTES], payload):
        raise ChunkError("checksum differs")
    if (head.namespace, head.key) != (namespace, key):
        raise ChunkError("another chunk's file")
    return payload


def _checksum(rest: bytes | memoryview, payload: bytes | bytearray | memoryview) -> bytes:
    return mmh3.mmh3_x64_128_digest(payload, zlib.crc32(rest))
