"""What an engine's log says about its start."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from prefixpool_agent.engines.progress import STARTING, progress

READ_BYTES: Final = 1 << 18  # a start writes some tens of KB


def stage(log: Path) -> tuple[str, float]:
    """(words, fraction from 0 to 1) of the furthest stage so far."""
    try:
        with log.open("rb") as file:
            text = file.read(READ_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return STARTING
    found = progress(text.splitlines())
    return found.text, found.fraction
