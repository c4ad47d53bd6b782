"""Where a child's output goes: a log file, or on to our own standard output; and its last line, for when it ends."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

_TAIL_BYTES: Final = 8192
_PIECE_BYTES: Final = 1 << 16
_PIECES: Final = 16  # at once, more than a pipe holds: a child that writes without a pause must not keep us from all else


class Output(Protocol):
    """`write_end`: what the child gets, to be closed in this process once the child has it."""

    write_end: int

    def tail(self) -> bytes:
        """The end of what this child has written."""
        ...


class LogFile:
    """Appended to. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.write_end = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        self._start = os.fstat(self.write_end).st_size

    def tail(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._start if self._start <= size else 0, size - _TAIL_BYTES))
                return file.read()
        except OSError:
            return b""


class Relay:
    """Passed on in whole lines, as in a container, whose runtime keeps them. Ends when the last writer has ended."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._read_end, False)
        self._tail = self._line = b""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._read_end, self._readable)

    def tail(self) -> bytes:
        if self._read_end >= 0:
            self._readable()  # its end may be known before its last words
        return self._tail

    def _readable(self) -> None:
        with suppress(BlockingIOError):
            for _ in range(_PIECES):
                if not (piece := os.read(self._read_end, _PIECE_BYTES)):
                    self._ended()
                    return
                self._tail = (self._tail + piece)[-_TAIL_BYTES:]
                lines, newline, self._line = (self._line + piece).rpartition(b"\n")
                _write(lines + newline)
                if len(self._line) > _PIECE_BYTES:
                    self._flush()

    def _ended(self) -> None:
        self._flush()
        self._loop.remove_reader(self._read_end)
        os.close(self._read_end)
        self._read_end = -1

    def _flush(self) -> None:
        _write(self._line)
        self._line = b""


def output(log: str) -> Output:
    """ "" is standard output. Raises OSError."""
    return LogFile(Path(log)) if log else Relay()


def _write(data: bytes) -> None:
    """All of it: under PYTHONUNBUFFERED, as in many images, this is a bare file, which a signal may stop half-way."""
    out, rest = sys.stdout.buffer, memoryview(data)
    with suppress(OSError):  # nobody reads any more: the child shall not end because of that
        while rest:
            rest = rest[out.write(rest) or len(rest) :]
        out.flush()
