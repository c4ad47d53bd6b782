"""What goes wrong on the command line, in words for a person."""

from __future__ import annotations

from prefixpool.errors import PrefixpoolError


class CliError(PrefixpoolError):
    """Ends the command with exit code 1. `hint` says what to do about it."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class PoolError(CliError):
    """A part of a local pool did not start, or died."""


def unusable(error: OSError) -> CliError:
    """A file or folder that a person named, and that cannot be read or written."""
    name = f"{error.filename}: " if error.filename is not None else ""
    return CliError(f"{name}{error.strerror or error}")
