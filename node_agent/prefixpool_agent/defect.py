"""Telling of bugs that were met while prompts were at hand."""

from __future__ import annotations

import logging
import traceback
from pathlib import Path
from typing import Final

_FRAMES: Final = 4  # the innermost ones


def log_defect(log: logging.Logger, what: str, error: Exception) -> None:
    """Only the error's kind and place: its text could quote a prompt."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    where = " > ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
    log.error(what, extra={"error": type(error).__name__, "where": where})
