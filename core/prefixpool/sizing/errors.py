"""What cannot be sized, in words."""

from __future__ import annotations

from prefixpool.errors import PrefixpoolError


class ShapeError(PrefixpoolError):
    """A config.json cannot be sized; the message names the field."""


class SizingError(PrefixpoolError):
    """A plan was asked for with settings that contradict each other; the message names them."""
