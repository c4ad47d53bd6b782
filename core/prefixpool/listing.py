"""Names in a sentence for people: a few of many."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice


def listed(names: Collection[str], most: int, between: str = ", ") -> str:
    """`a, b and 3 more`; empty for no names."""
    shown = between.join(islice(names, most))
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
