"""Where commands print: as wide as the terminal; where there is none (pipes, logs), wide enough for our tables."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, TextIO

from rich.console import Console
from rich.markup import escape

WIDTH_WITHOUT_TERMINAL: Final = 140


class PipeConsole(Console):
    """If nobody reads any more (`prefixpool up | head`), a running command is ended in order, like by SIGTERM."""

    def __init__(self, width: int | None = None) -> None:
        super().__init__(width=width, emoji=False)  # `:100:` in an address is no emoji
        self.reader_left = False

    def on_broken_pipe(self) -> None:
        self.quiet = True
        self.reader_left = True
        _forget(sys.stdout)
        try:
            asyncio.get_running_loop()
        except RuntimeError:  # nothing is to be cleaned up
            raise SystemExit(1) from None
        signal.raise_signal(signal.SIGTERM)  # interrupt.run is there to hear it


def console() -> PipeConsole:
    """Standard output."""
    found = PipeConsole()
    return found if found.is_terminal else PipeConsole(WIDTH_WITHOUT_TERMINAL)


def printable(text: str) -> str:
    """Text of others, to stand where there is no markup: nothing in it tells the terminal anything."""
    return "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text)


def shown(text: str) -> str:
    """Text of others, to stand in our markup: nothing in it is a tag either."""
    return escape(printable(text))


class OutputError(OSError):
    """Standard output takes nothing more: a full disk, a terminal that is gone."""


class Output(io.TextIOWrapper):
    """Standard output. Raises OutputError, so that it is told from whatever else cannot be written or read."""

    def write(self, text: str) -> int:
        with _told_apart():
            return super().write(text)

    def flush(self) -> None:
        with _told_apart():
            super().flush()


@contextmanager
def written_output() -> Iterator[None]:
    """A command whose output cannot be written ends with a line and exit code 1; with the code alone if nobody reads it."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # not None (`>&-`), not a test's
        sys.stdout = _output(sys.stdout)
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        _forget(sys.stdout)
        raise SystemExit(1) from None
    except OutputError as error:
        _forget(sys.stdout)
        try:
            sys.stderr.write(f"error: standard output cannot be written: {error.strerror}\n")
            sys.stderr.flush()
        except OSError:  # it lies on the same disk
            _forget(sys.stderr)
        raise SystemExit(1) from None


def _output(found: io.TextIOWrapper) -> Output:
    """Marks that the terminal's encoding does not have become `?`: better than no plan at all."""
    encoding, errors = found.encoding, "replace" if found.errors == "strict" else found.errors
    lines, at_once = found.line_buffering, found.write_through
    return Output(found.detach(), encoding, errors, line_buffering=lines, write_through=at_once)


@contextmanager
def _told_apart() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # rich and typer know it
        raise
    except OSError as error:
        raise OutputError(error.errno, error.strerror) from error


def _forget(stream: TextIO) -> None:
    """What is still to be written goes nowhere, lest the interpreter complain of it at its end."""
    with suppress(OSError, ValueError):  # closed, or no file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
