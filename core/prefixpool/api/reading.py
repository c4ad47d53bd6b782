"""From plain objects to structs. Errors name the field as a person finds it in the object, and what would be right."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec

from prefixpool.api.quantity import Amount, Bytes
from prefixpool.api.resource import NAME_MOST, NAME_PATTERN
from prefixpool.errors import PrefixpoolError

T = TypeVar("T", bound=msgspec.Struct)

_AT: Final = re.compile(r"(?P<what>.*?)(?: - at (?:`key` in )?`\$(?P<path>.*)`)?", re.DOTALL)
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*)`")
_MISSING: Final = re.compile(r"Object missing required field `(.*)`")
_NO_MEMBER: Final = re.compile(r"Invalid enum value (.*)")


class SpecError(PrefixpoolError):
    """A spec cannot be used as it is; the message begins with the field."""


def check_name(obj: Mapping[str, Any]) -> None:
    """SpecError if children of a pool of this name could not be named."""
    name = (obj.get("metadata") or {}).get("name", "")
    if not isinstance(name, str) or len(name) > NAME_MOST or not re.fullmatch(NAME_PATTERN, name):
        raise SpecError(f"metadata.name: {name!r} {NAME_RULE}")


NAME_RULE: Final = (
    f"cannot name pods and Services: use at most {NAME_MOST} lower-case letters, digits and dashes, beginning with a letter"
)


def read(kind: type[T], raw: Any, root: str) -> T:
    """SpecError names the field, beginning with `root`."""
    try:
        return msgspec.convert(raw, kind, dec_hook=_parsed)
    except msgspec.ValidationError as error:
        raise SpecError(_in_words(kind, str(error), root)) from error


def _parsed(kind: type, raw: Any) -> Any:
    if issubclass(kind, Bytes | Amount):
        return kind.parse(raw)
    raise NotImplementedError(f"no reader for {kind}")


def _in_words(kind: type[msgspec.Struct], message: str, root: str) -> str:
    found = _AT.fullmatch(message)
    assert found
    what, path = found["what"], found["path"] or ""
    if unknown := _UNKNOWN.fullmatch(what):
        return f"{root}{path}.{unknown[1]}: no such field; there are {', '.join(_choices(kind, path))}"
    if missing := _MISSING.fullmatch(what):
        return f"{root}{path}.{missing[1]}: missing, but needed"
    if wrong := _NO_MEMBER.fullmatch(what):
        return f"{root}{path}: {wrong[1]} is none of {', '.join(_choices(kind, path))}"
    return f"{root}{path}: {what[:1].lower()}{what[1:]}".replace(" | null`", "`")


def _choices(kind: type[msgspec.Struct], path: str) -> list[str]:
    """Fields, or values, that are accepted at a path such as `.engine.env[...]`."""
    info = plain(msgspec.inspect.type_info(kind))
    for step in re.findall(r"\w+|\[\.\.\.\]", path):
        if isinstance(info, msgspec.inspect.StructType):
            info = plain(next(field.type for field in info.fields if field.encode_name == step))
        elif isinstance(info, msgspec.inspect.VarTupleType):
            info = plain(info.item_type)
        elif isinstance(info, msgspec.inspect.DictType):
            info = plain(info.value_type)
    if isinstance(info, msgspec.inspect.StructType):
        return [field.encode_name for field in info.fields]
    return [str(member.value) for member in info.cls] if isinstance(info, msgspec.inspect.EnumType) else []


def plain(info: msgspec.inspect.Type) -> msgspec.inspect.Type:
    """Without what is said about a type, and without the possibility that there is none."""
    if isinstance(info, msgspec.inspect.Metadata):
        return plain(info.type)
    if isinstance(info, msgspec.inspect.UnionType):
        return plain(next(one for one in info.types if not isinstance(one, msgspec.inspect.NoneType)))
    return info
