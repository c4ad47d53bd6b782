"""Digests that outlive an upgrade: of what was given, not of how a version writes it."""

from __future__ import annotations

import hashlib
from enum import Enum
from typing import Any

import msgspec


def digest(value: Any) -> str:
    """16 hexadecimal digits; equal for equal JSON, whatever the order of its keys."""
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()[:16]


def given(value: Any) -> Any:
    """What of a struct differs from its defaults, all the way down: fields that a later version adds change nothing."""
    if isinstance(value, msgspec.Struct):
        found = {
            field.name: getattr(value, field.name) for field in msgspec.structs.fields(type(value)) if _set(value, field)
        }
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


def _set(value: msgspec.Struct, field: msgspec.structs.FieldInfo) -> bool:
    default = field.default
    if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    found: Any = getattr(value, field.name)
    return bool(found != default)
