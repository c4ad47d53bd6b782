"""What one pool of a machine takes and no other may: ports, cores. Names in the kernel, gone with the process that has them.

They are abstract unix sockets: no files, no permissions to get wrong, nothing to clean up behind a killed process. They
belong to a network namespace, as ports do. Child processes do not inherit them.
"""

from __future__ import annotations

import errno
import socket
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from weakref import finalize

_PREFIX: Final = "prefixpool-"
_TABLE: Final = Path("/proc/net/unix")


class Claims:
    """All claims of one owner. Given back by `release`, by `close`, or when the owner is forgotten or dies."""

    def __init__(self) -> None:
        self._held: dict[str, socket.socket] = {}
        self._closing = finalize(self, _close, self._held)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def take(self, name: str) -> bool:
        """False if anybody has it already, this owner included. Raises OSError if no more files may be open.

        Where a sandbox forbids such names, only this owner knows of its claims.
        """
        if name in self._held:
            return False
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0{_PREFIX}{name}")
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                claim.close()
                return False
        self._held[name] = claim
        return True

    def release(self, *names: str) -> None:
        """Names that are not held are fine."""
        for name in names:
            if (claim := self._held.pop(name, None)) is not None:
                claim.close()

    def close(self) -> None:
        """Give everything back. May be called twice, and new claims may follow."""
        self.release(*self._held)


def claimed(table: Path = _TABLE) -> set[str]:
    """Names that anybody has now; none where the kernel does not tell."""
    try:
        lines = table.read_text(errors="replace").splitlines()
    except OSError:
        return set()
    mark = f"@{_PREFIX}"
    return {line.partition(mark)[2] for line in lines if mark in line}


def _close(held: dict[str, socket.socket]) -> None:
    for claim in held.values():
        claim.close()
