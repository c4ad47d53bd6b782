"""Settings: declared once as a msgspec struct, read from flags and environment, printed as reference documentation.

A settings struct is frozen, keyword-only, and every field is `Annotated[type, msgspec.Meta(description=...)]`. From it come
the command-line flags (`--listen-port`), the environment variables (`<PREFIX>_LISTEN_PORT`), `--help`, and the table in
docs/reference/settings.md. Flags win over the environment, which wins over the default. Flags of lists may be repeated.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from prefixpool.errors import SettingsError

T = TypeVar("T", bound=msgspec.Struct)

# Eleven days in seconds, which most of them are: beyond that, kernel and event loops refuse what they are told, each at its
# own point, and long after the start.
_MOST: Final = 1e6
_CHOICE: Final = "|"  # between the values of an enum, where types are named


class Option(NamedTuple):
    """One setting, as the outside sees it."""

    field: str
    flag: str
    env: str
    type_name: str
    default: str  # "" and required=True: none
    required: bool
    description: str


def options(settings: type[msgspec.Struct], prefix: str) -> list[Option]:
    """All settings of a program, in the order of declaration. Raises TypeError for a field without description."""
    return [_option(field, prefix) for field in msgspec.structs.fields(settings)]


def parse(
    settings: type[T],
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    prefix: str,
    parser: argparse.ArgumentParser,
) -> T:
    """Read flags and environment into the struct. Raises SettingsError that names the setting and its source.

    `parser` brings the program's description; `--help` and unknown flags exit as argparse does.
    """
    found = options(settings, prefix)
    for option in found:
        default = "required" if option.required else f"default: {option.default or 'empty'}"
        parser.add_argument(
            option.flag,
            dest=option.field,
            metavar=option.type_name if _CHOICE in option.type_name else option.type_name.upper(),
            default=None,
            action="append" if option.type_name == "list" else "store",
            help=f"{option.description} ({default}; env {option.env})".replace("%", "%%"),
        )
    flags = vars(parser.parse_args(argv))
    values: dict[str, Any] = {}
    for option in found:
        raw, source = _raw(option, flags.get(option.field), env)
        if raw is not None:
            values[option.field] = _convert(settings, option, raw, source)
        elif option.required:
            raise SettingsError(f"{option.flag} is required (or set {option.env}): {option.description}")
    try:
        return msgspec.convert(values, settings, strict=False)
    except msgspec.ValidationError as error:
        raise SettingsError(str(error)) from error


def _raw(option: Option, flag: str | list[str] | None, env: Mapping[str, str]) -> tuple[str | None, str]:
    if flag is not None:
        return flag if isinstance(flag, str) else ",".join(flag), option.flag
    return env.get(option.env), option.env


def _convert(settings: type[msgspec.Struct], option: Option, raw: str, source: str) -> Any:
    if not raw.isascii() and any("\ud800" <= char <= "\udfff" for char in raw):  # how Python shows bytes of other encodings
        raise SettingsError(f"{source}={raw!r}: not a text in UTF-8")
    kind = next(f.type for f in msgspec.structs.fields(settings) if f.name == option.field)
    try:
        if _is_sequence(kind):
            return msgspec.convert([part for part in raw.split(",") if part], kind, strict=False)
        value = msgspec.convert(raw, kind, strict=False)
        if isinstance(value, float) and not value <= _MOST:  # nor is it a number at all
            raise SettingsError(f"{source}={raw!r}: Expected `float` <= {_MOST:.0f}")
        return value
    except msgspec.ValidationError as error:
        accepted = f"; accepted: {option.type_name.replace(_CHOICE, ', ')}" if _CHOICE in option.type_name else ""
        raise SettingsError(f"{source}={raw!r}: {error}{accepted}") from error


def _is_sequence(kind: Any) -> bool:
    info = msgspec.inspect.type_info(kind)
    while isinstance(info, msgspec.inspect.Metadata):
        info = info.type
    return isinstance(info, msgspec.inspect.VarTupleType | msgspec.inspect.ListType)


def _option(field: msgspec.structs.FieldInfo, prefix: str) -> Option:
    info = msgspec.inspect.type_info(field.type)
    description = ""
    while isinstance(info, msgspec.inspect.Metadata):
        description = description or str((info.extra_json_schema or {}).get("description", ""))
        info = info.type
    if not description:
        raise TypeError(f"setting {field.name} has no description")
    default: Any = field.default
    if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
        default = field.default_factory()
    required = default is msgspec.NODEFAULT
    name = field.name
    return Option(
        field=name,
        flag="--" + name.replace("_", "-"),
        env=f"{prefix}_{name.upper()}",
        type_name=_type_name(info),
        default="" if required else _shown(default),
        required=required,
        description=description,
    )


def _shown(default: Any) -> str:
    if isinstance(default, tuple | list):
        return ",".join(map(str, default))
    return str(default)


def _type_name(info: msgspec.inspect.Type) -> str:
    names: dict[type[msgspec.inspect.Type], str] = {
        msgspec.inspect.IntType: "int",
        msgspec.inspect.FloatType: "float",
        msgspec.inspect.BoolType: "bool",
        msgspec.inspect.StrType: "text",
        msgspec.inspect.VarTupleType: "list",
        msgspec.inspect.ListType: "list",
    }
    if isinstance(info, msgspec.inspect.EnumType):
        return _CHOICE.join(str(member.value) for member in info.cls)
    return names.get(type(info), "text")
