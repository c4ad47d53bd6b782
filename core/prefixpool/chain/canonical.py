"""A request as the model will read it: seed and segments. Pure; knows nothing of tokens or HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple

from prefixpool.wire import Template


class SegmentKind(IntEnum):
    """How a segment's bytes relate to the text that the template prints."""

    TEXT = 0  # printed as it is
    JSON = 1  # re-serialised by the template (tools, tool calls): only its string literals survive
    TOKENS = 2  # token ids, 4 bytes little-endian each: no text at all
    OPAQUE = 3  # an image or another part, by digest: occupies an unknown number of tokens


class Segment(NamedTuple):
    """One run of content behind one role marker."""

    role: str
    data: bytes
    kind: SegmentKind = SegmentKind.TEXT


class Canonical(NamedTuple):
    """`appendable`: the next turn of the same conversation repeats these bytes and adds to them."""

    seed: bytes  # model, adapter, salt, template and whatever changes rendering; 8 bytes or more
    segments: tuple[Segment, ...]
    generation: bool  # the render ends with the generation prompt (an assistant role marker)
    lead: int  # number of leading segments that are system text or tools


def canonical(
    path: str, body: Mapping[str, Any], *, template: Template | None = None, salt: str = "", day: str = ""
) -> Canonical | None:
    """None if requests of this path have no prefix chain, or the body has no usable prompt (the engine will say why).

    `salt`: the scope's cache salt; the agent passes the body's own `cache_salt`. `day`: ISO date (UTC), used only if the
    template prints it.
    """
    raise NotImplementedError
