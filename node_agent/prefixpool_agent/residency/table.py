"""Byte strings of a model's tokens, from its tokenizer.json alone: no tokenizer library, no merges, no regular expressions.

Two families cover what vLLM serves: byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM2, DeepSeek), where each character of a
vocabulary entry stands for one byte, and SentencePiece in the `tokenizers` format (Llama 2, Mistral, Gemma), where U+2581 is
a blank and `<0xNN>` a raw byte.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from prefixpool.errors import PrefixpoolError

_BLANK: Final = "\u2581"
_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class VocabularyError(PrefixpoolError):
    """The model folder's vocabulary cannot be read as bytes; the message names the file and what was found."""


class TokenTable(Protocol):
    """`table[id]` is the token's bytes, b"" for ids that the model does not have."""

    def __getitem__(self, token: int, /) -> bytes: ...


class Vocabulary(dict[int, bytes]):
    """A token table read from a model folder; a dictionary, because lookups by the million must not run Python code."""

    def __missing__(self, token: int) -> bytes:
        return b""


def load_table(folder: Path) -> Vocabulary:
    """Read `tokenizer.json` of a model folder. Raises VocabularyError when it is missing, broken or of another family."""
    path = folder / "tokenizer.json"
    try:
        document = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise VocabularyError(f"{path}: cannot be read ({error.strerror}); the agent needs the tokens' bytes") from error
    except msgspec.DecodeError as error:
        raise VocabularyError(f"{path}: not JSON ({error})") from error
    try:
        return parse_table(document)
    except VocabularyError as error:
        raise VocabularyError(f"{path}: {error}") from error


def parse_table(document: Any) -> Vocabulary:
    """The same from the decoded document. Raises VocabularyError."""
    if not isinstance(document, Mapping) or not isinstance(document.get("model"), Mapping):
        raise VocabularyError("no `model` section: not a tokenizer.json")
    model = document["model"]
    pieces = _pieces(model.get("vocab"))
    kinds = frozenset(_component_types(document))
    if "ByteLevel" in kinds:
        table = Vocabulary({token: _byte_level(piece) for token, piece in pieces.items()})
    elif model.get("byte_fallback") is True or "Metaspace" in kinds or any(_BLANK in piece for piece in pieces.values()):
        table = Vocabulary({token: _sentence_piece(piece) for token, piece in pieces.items()})
    else:
        found = f"model {model.get('type')!r} with {', '.join(sorted(kinds)) or 'no pre-tokenizer and no decoder'}"
        raise VocabularyError(f"neither byte-level BPE nor SentencePiece: {found}")
    table.update(_added(document.get("added_tokens")))
    return table


def _pieces(vocabulary: Any) -> dict[int, str]:
    """BPE maps pieces to ids; Unigram lists [piece, score] in the order of ids."""
    try:
        if isinstance(vocabulary, Mapping):
            return {int(token): str(piece) for piece, token in vocabulary.items()}
        return {token: str(piece) for token, (piece, _score) in enumerate(vocabulary)}
    except (TypeError, ValueError) as error:
        raise VocabularyError(f"`model.vocab` is neither a map of ids nor a list of [piece, score]: {error}") from error


def _component_types(document: Mapping[str, Any]) -> Iterator[str]:
    """Types of pre-tokenizers and decoders, those inside a Sequence included."""
    todo = [document.get("pre_tokenizer"), document.get("decoder")]
    while todo:
        component = todo.pop()
        if isinstance(component, Mapping):
            yield str(component.get("type"))
            todo += [*(component.get("pretokenizers") or ()), *(component.get("decoders") or ())]


def _alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET: Final = _alphabet()


def _byte_level(piece: str) -> bytes:
    try:
        return bytes([_ALPHABET[character] for character in piece])
    except KeyError:  # an entry that no text can produce, or a special token listed in the vocabulary: its own text
        return piece.encode("utf-8", "surrogatepass")


def _sentence_piece(piece: str) -> bytes:
    if byte := _BYTE.fullmatch(piece):
        return bytes([int(byte[1], 16)])
    return piece.replace(_BLANK, " ").encode("utf-8", "surrogatepass")


def _added(tokens: Any) -> dict[int, bytes]:
    """Added tokens are matched as plain text before anything else, so their bytes are their text."""
    try:
        return {int(token["id"]): str(token["content"]).encode("utf-8", "surrogatepass") for token in tokens or ()}
    except (TypeError, KeyError, ValueError) as error:
        raise VocabularyError(f"`added_tokens` is not a list of {{id, content}}: {error}") from error
