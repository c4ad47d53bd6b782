"""What all types of the API share.

A rule stands next to the fields it is about, once in CEL for the API server and once in Python for every other reader; a
test holds the two together. Fields that cannot change in a living pool are named with what to do instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Final, NamedTuple

import msgspec
from msgspec import Meta


class Rule(NamedTuple):
    """Fields that must agree."""

    cel: str  # empty where CEL cannot say it, as of sizes that are written as quantities
    message: str  # says the fix
    holds: Callable[[Any], bool]
    field: str = ""  # the field to blame, in CEL's words; empty: the object itself


class ApiStruct(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Part of a spec. ValueError (with msgspec: ValidationError with a path) if a rule is broken."""

    rules: ClassVar[tuple[Rule, ...]] = ()
    immutable: ClassVar[Mapping[str, str]] = {}  # field -> what to do instead of changing it

    def __post_init__(self) -> None:
        for rule in self.rules:
            if not rule.holds(self):
                raise ValueError(rule.message)


class StatusStruct(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Part of a status. Fields of other versions are passed over."""


def at_most_one(*given: object) -> bool:
    """Whether no two of them are there."""
    return sum(one is not None for one in given) <= 1


def _list_type(kind: str, *keys: str) -> dict[str, Any]:
    return {"x-kubernetes-list-type": kind} | ({"x-kubernetes-list-map-keys": list(keys)} if keys else {})


# Every string, list and map has a bound, else the API server cannot bound what rules cost.
ATOMIC: Final = _list_type("atomic")
BY_NAME: Final = _list_type("map", "name")
BY_TYPE: Final = _list_type("map", "type")
OPEN: Final[dict[str, Any]] = {"x-kubernetes-preserve-unknown-fields": True}
OPEN_ENUM: Final[dict[str, Any]] = {"enum": None, "maxLength": 64}  # values of later versions must pass

ObjectName = Annotated[str, Meta(min_length=1, max_length=253)]
Text = Annotated[str, Meta(min_length=1, max_length=253)]
Path = Annotated[str, Meta(min_length=1, max_length=1024)]
Small = Annotated[int, Meta(ge=1, le=1024)]
Tokens = Annotated[int, Meta(ge=1, le=100_000_000)]
Seconds = Annotated[int, Meta(ge=0, le=86_400)]
Timeout = Annotated[int, Meta(ge=1, le=86_400)]
REPLICAS_MOST: Final = 1000
Replicas = Annotated[int, Meta(ge=0, le=REPLICAS_MOST)]
