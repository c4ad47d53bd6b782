"""A tokenizer that needs no files: a BPE-like splitter whose ids carry their own bytes.

Text is cut as byte-level BPE vocabularies do it (a word with its leading space, up to three digits, punctuation, blanks,
newlines, anything beyond ASCII), then each piece into runs of up to 4 ASCII or 3 other bytes. So a multi-byte character
may lie across two tokens, as with real vocabularies, and appending text changes only the last piece.

Id layout (fits u32): bits 31..28 hold the length, plus 8 for raw bytes; below, ASCII bytes take 7 bits each, raw bytes 8.
Special tokens have the ids 0, 1 and 2, which no run of bytes can have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

END_OF_TEXT: Final = 0
IM_START: Final = 1
IM_END: Final = 2
SPECIALS: Final = {"<|endoftext|>": END_OF_TEXT, "<|im_start|>": IM_START, "<|im_end|>": IM_END}
SPECIAL_BYTES: Final = {token: text.encode() for text, token in SPECIALS.items()}

ASCII_RUN: Final = 4
RAW_RUN: Final = 3
MAX_CHARS_PER_TOKEN: Final = max(map(len, SPECIALS))
_RAW: Final = 8
_MEMO_PIECES: Final = 100_000  # pieces repeat as words do; the memo is dropped when it is full

_SPECIAL: Final = re.compile("(" + "|".join(map(re.escape, SPECIALS)) + ")")
_PIECE: Final = re.compile(
    r"\n+| ?[A-Za-z]+| ?[0-9]{1,3}|[^\x00-\x7f]+| ?[^\sA-Za-z0-9\x80-\U0010ffff]+|[^\S\n]+(?!\S)|[^\S\n]+", re.ASCII
)


def token_bytes(token: int) -> bytes:
    """The bytes that a token stands for, special tokens as their text. Raises KeyError for an id that no text can have."""
    special = SPECIAL_BYTES.get(token)
    if special is not None:
        return special
    size, raw = token >> 28 & 7, token >> 31
    if token >> 32 or not 1 <= size <= (RAW_RUN if raw else ASCII_RUN):
        raise KeyError(token)
    bits, mask = (8, 0xFF) if raw else (7, 0x7F)
    if token & 0x0FFFFFFF >> (28 - bits * size) != token & 0x0FFFFFFF:
        raise KeyError(token)
    return bytes(token >> bits * (size - 1 - i) & mask for i in range(size))


def _pack(run: bytes, raw: bool) -> int:
    bits, token = (8 if raw else 7), 0
    for byte in run:
        token = token << bits | byte
    return len(run) + (_RAW if raw else 0) << 28 | token


def _encode_piece(piece: str) -> tuple[int, ...]:
    raw = not piece.isascii()
    data = piece.encode("utf-8", "surrogatepass")
    step = RAW_RUN if raw else ASCII_RUN
    return tuple(_pack(data[i : i + step], raw) for i in range(0, len(data), step))


class SimTokenizer:
    """Keeps a memo of pieces; otherwise without state. Not thread-safe."""

    def __init__(self) -> None:
        self._memo: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str) -> list[int]:
        """Token ids; the texts of special tokens become those tokens, as in chat models' tokenizers."""
        out: list[int] = []
        for i, part in enumerate(_SPECIAL.split(text)):
            if i % 2:
                out.append(SPECIALS[part])
            else:
                self._encode_plain(part, out)
        return out

    def _encode_plain(self, text: str, out: list[int]) -> None:
        memo = self._memo
        if len(memo) > _MEMO_PIECES:
            memo.clear()
        for piece in _PIECE.findall(text):
            tokens = memo.get(piece)
            if tokens is None:
                tokens = memo[piece] = _encode_piece(piece)
            out.extend(tokens)

    def decode(self, tokens: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of the tokens; broken UTF-8 shows as U+FFFD. Raises KeyError for an unknown id."""
        data = b"".join(token_bytes(token) for token in tokens if not (skip_special and token in SPECIAL_BYTES))
        return data.decode("utf-8", "replace")


class SimTokenTable:
    """`table[id] -> bytes`, for the agent's residency join."""

    def __getitem__(self, token: int) -> bytes:
        return token_bytes(token)
