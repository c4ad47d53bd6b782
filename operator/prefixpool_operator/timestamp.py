"""Times as Kubernetes writes them."""

from __future__ import annotations

from datetime import UTC, datetime


def seconds(stamp: str) -> float:
    """Since 1970."""
    return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()


def stamp(at_s: float) -> str:
    """To the second; `at_s` since 1970."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
