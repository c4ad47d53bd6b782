"""Structural schema of our structs, as the API server takes it: no `$ref`, no null unions, a bound on all that can grow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec
from msgspec import NODEFAULT, inspect

from prefixpool.api.quantity import LENGTH_MOST, Amount, Bytes
from prefixpool.api.reading import plain
from prefixpool.api.struct import ApiStruct

Schema = dict[str, Any]

_INT32_MOST: Final = 2**31 - 1


def struct_schema(kind: type[msgspec.Struct]) -> Schema:
    """TypeError names a field that lacks a description or a bound."""
    return _struct(inspect.type_info(kind))


def _of(info: inspect.Type) -> Schema:
    if isinstance(info, inspect.Metadata):
        found = _of(info.type) | (info.extra_json_schema or {})
        return {key: value for key, value in found.items() if value is not None}
    if isinstance(info, inspect.UnionType):
        return _of(next(one for one in info.types if not isinstance(one, inspect.NoneType)))
    return _WRITERS[type(info)](info)


def _struct(info: Any) -> Schema:
    properties = {field.encode_name: _field(field, info.cls) for field in info.fields}
    required = [field.encode_name for field in info.fields if field.required]
    found: Schema = {"type": "object", "properties": properties}
    if required:
        found["required"] = required
    if rules := _rules(info.cls, {field.encode_name: _always_there(field) for field in info.fields}):
        found["x-kubernetes-validations"] = rules
    return found


def _field(field: inspect.Field, owner: type[msgspec.Struct]) -> Schema:
    schema = _of(field.type)
    if not schema.get("description"):
        raise TypeError(f"{owner.__name__}.{field.name} has no description")
    default = _default(field)
    known = {"description": schema.pop("description")} | ({} if default is None else {"default": default})
    return known | schema


def _default(field: inspect.Field) -> Any:
    """None: none, or as good as leaving the field out. Of objects whole, because the API server tries rules on it."""
    if field.default is NODEFAULT or field.default is None or field.default == ():
        return None
    if not isinstance(field.default, msgspec.Struct):
        return msgspec.to_builtins(field.default)
    fields = inspect.type_info(type(field.default)).fields  # type: ignore[attr-defined]  # of a struct
    return {one.encode_name: default for one in fields if (default := _default(one)) is not None}


def _always_there(field: inspect.Field) -> bool:
    return field.required or _default(field) is not None


def _rules(kind: type[msgspec.Struct], always: Mapping[str, bool]) -> list[Schema]:
    if not issubclass(kind, ApiStruct):
        return []
    rules = [_validation(rule.cel, rule.message, rule.field) for rule in kind.rules if rule.cel]
    for name, instead in kind.immutable.items():
        rules.append(_validation(_unchanged(name, always[name]), f"{name} cannot change: {instead}", f".{name}"))
    return rules


def _validation(cel: str, message: str, field: str) -> Schema:
    return {"rule": cel, "message": message} | ({"fieldPath": field} if field else {})


def _unchanged(name: str, always: bool) -> str:
    if always:
        return f"self.{name} == oldSelf.{name}"
    return f"has(self.{name}) == has(oldSelf.{name}) && (!has(self.{name}) || self.{name} == oldSelf.{name})"


def _whole_number(info: Any) -> Schema:
    small = info.le is not None and info.le <= _INT32_MOST
    bounds = {"minimum": info.ge, "maximum": info.le}
    return {"type": "integer", "format": "int32" if small else "int64"} | _given(bounds)


def _text(info: Any) -> Schema:
    if info.max_length is None:
        raise TypeError("a string has no max_length")
    return {"type": "string"} | _given({"minLength": info.min_length, "maxLength": info.max_length, "pattern": info.pattern})


def _list(info: Any) -> Schema:
    if info.max_length is None:
        raise TypeError("a list has no max_length")
    return {"type": "array", "items": _of(info.item_type)} | _given(
        {"minItems": info.min_length, "maxItems": info.max_length}
    )


def _map(info: Any) -> Schema:
    if isinstance(plain(info.value_type), inspect.AnyType):
        return {"type": "object"}
    if info.max_length is None:
        raise TypeError("a map has no max_length")
    return {"type": "object", "additionalProperties": _of(info.value_type), "maxProperties": info.max_length}


def _quantity(info: Any) -> Schema:
    if not issubclass(info.cls, Bytes | Amount):
        raise TypeError(f"no schema for {info.cls}")
    return {
        "anyOf": [{"type": "integer"}, {"type": "string"}],
        "pattern": info.cls.pattern,
        "maxLength": LENGTH_MOST,
        "x-kubernetes-int-or-string": True,
    }


def _given(keywords: Schema) -> Schema:
    return {key: value for key, value in keywords.items() if value is not None}


_WRITERS: Final[Mapping[type[inspect.Type], Callable[[Any], Schema]]] = {
    inspect.StructType: _struct,
    inspect.BoolType: lambda _: {"type": "boolean"},
    inspect.IntType: _whole_number,
    inspect.StrType: _text,
    inspect.EnumType: lambda info: {"type": "string", "enum": [member.value for member in info.cls]},
    inspect.VarTupleType: _list,
    inspect.DictType: _map,
    inspect.CustomType: _quantity,
}
