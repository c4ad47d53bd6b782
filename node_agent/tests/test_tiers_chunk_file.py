"""A chunk's file is read whole and unchanged, or not at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixpool_agent.tiers.chunk_file import HEAD_BYTES, ChunkError, Head, decode, encode, verify

NAMESPACE = bytes(range(16))
KEY = b"k" * 36
PAYLOAD = bytes(range(256)) * 4


def whole(payload: bytes = PAYLOAD, key: bytes = KEY) -> bytes:
    return encode(Head(NAMESPACE, key, b"parent", 64, len(payload)), payload) + payload


def test_what_was_written_is_read() -> None:
    data = whole()
    assert decode(data) == Head(NAMESPACE, KEY, b"parent", 64, len(PAYLOAD))
    assert bytes(verify(memoryview(data), NAMESPACE, KEY)) == PAYLOAD


@given(st.integers(0, 8 * len(whole()) - 1))
def test_no_flipped_bit_goes_unnoticed(bit: int) -> None:
    data = bytearray(whole())
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ChunkError):
        verify(memoryview(data), NAMESPACE, KEY)


@given(st.integers(0, len(whole()) - 1))
def test_no_shortened_file_goes_unnoticed(length: int) -> None:
    with pytest.raises(ChunkError):
        verify(memoryview(whole())[:length], NAMESPACE, KEY)


@pytest.mark.parametrize(("namespace", "key"), [(bytes(16), KEY), (NAMESPACE, b"other"), (NAMESPACE, KEY + b"0")])
def test_another_chunks_file_is_not_taken_for_this_one(namespace: bytes, key: bytes) -> None:
    with pytest.raises(ChunkError, match="another chunk"):
        verify(memoryview(whole()), namespace, key)


def test_longer_names_than_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        whole(key=bytes(73))
    assert len(whole(b"")) == HEAD_BYTES
