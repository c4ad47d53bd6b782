"""What an engine's log says about its start."""

from __future__ import annotations

from pathlib import Path


def stage(log: Path) -> tuple[str, float]:
    """(words, fraction)."""
    return ("loading", 0.1) if log.exists() else ("starting", 0.0)
