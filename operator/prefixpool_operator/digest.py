"""Digests that outlive an upgrade: of what was given, not of how a version writes it."""

from __future__ import annotations

import hashlib
from enum import Enum
from functools import cache
from typing import Any

import msgspec


def digest(value: Any) -> str:
    """16 hexadecimal digits; equal for equal JSON, whatever the order of its keys."""
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()[:16]


def given(value: Any) -> Any:
    """What of a struct differs from its defaults, all the way down: fields that a later version adds change nothing."""
    if isinstance(value, msgspec.Struct):
        found = {name: getattr(value, name) for name, default in _defaults(type(value)) if getattr(value, name) != default}
        return {name: given(inner) for name, inner in found.items()}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [given(one) for one in value]
    if isinstance(value, dict):
        return {name: given(inner) for name, inner in value.items()}
    if isinstance(value, str):  # quantities are kinds of numbers and texts
        return str(value)
    return int(value) if type(value) is not bool and isinstance(value, int) else value


@cache
def _defaults(kind: type[msgspec.Struct]) -> list[tuple[str, Any]]:
    """Fields and their defaults; NODEFAULT is equal to no value. Asking msgspec takes a millisecond, hence the cache."""
    return [
        (field.name, field.default_factory() if callable(field.default_factory) else field.default)
        for field in msgspec.structs.fields(kind)
    ]
