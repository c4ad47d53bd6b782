"""What an inspection of a model's files found, as one small JSON document.

The inspection runs in the pool's namespace, with its volume and token; the operator reads what it wrote. The document holds
the fields of config.json that sizing reads, and no others, because a termination message ends at 4,096 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from prefixpool.sizing import shape
from prefixpool.sizing.config import needed
from prefixpool.sizing.errors import ShapeError
from prefixpool.sizing.shape import ModelShape

DOCUMENT_MOST: Final = 4096  # bytes
EXIT_FAILED: Final = 1  # of the program: the document says why; another try would find the same
EXIT_SETTINGS: Final = 2
EXIT_AGAIN: Final = 3  # the document says why, and another try may go better
_QUOTED_CHARS: Final = 300


class Inspection(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Of one model at one revision."""

    config: dict[str, Any]  # as `config.needed` leaves it
    weight_bytes: int = 0  # of all tensors, by the headers of their files; 0: there are none
    revision: str = ""  # commit; empty for a folder

    def shape(self, name: str) -> ModelShape:
        """ShapeError names what is missing or odd in config.json."""
        found = shape.parse(self.config, name)
        return shape.with_stored_bytes(found, self.weight_bytes) if self.weight_bytes else found


class _Document(Inspection, frozen=True, kw_only=True):
    config: dict[str, Any] = {}
    error: str = ""  # why there is nothing else


def inspection(config: Mapping[str, Any], weight_bytes: int, revision: str) -> Inspection:
    """ShapeError if sizing could not use it: better said where the files are."""
    found = Inspection(config=needed(config), weight_bytes=weight_bytes, revision=revision)
    found.shape("model")
    return found


def write(found: Inspection) -> bytes:
    """ShapeError if it is too long for a termination message."""
    text = msgspec.json.encode(found)
    if len(text) > DOCUMENT_MOST:
        raise ShapeError(f"what sizing needs of config.json takes {len(text)} bytes, more than {DOCUMENT_MOST}")
    return text


def write_error(why: str) -> bytes:
    """A document that says why there is no other."""
    return msgspec.json.encode({"error": why[: DOCUMENT_MOST // 4]})


def read(text: str | bytes) -> Inspection:
    """ShapeError with the inspection's own words if it failed, or if this is no such document."""
    try:
        found = msgspec.json.decode(text, type=_Document)
    except (msgspec.DecodeError, RecursionError) as error:
        last = (text if isinstance(text, str) else text.decode(errors="replace")).strip().rpartition("\n")[2]
        raise ShapeError(f"the inspection wrote nothing that can be read: {last[:_QUOTED_CHARS] or error}") from error
    if found.error or not found.config:
        raise ShapeError(found.error or "the inspection wrote no config")
    return Inspection(config=found.config, weight_bytes=found.weight_bytes, revision=found.revision)
