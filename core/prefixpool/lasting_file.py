"""Files that are read again and again while a program runs, such as mounted Secrets and lists of members."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_lasting(path: Path) -> bytes:
    """Its content. OSError also for what is no regular file: a pipe would be empty the second time, and whoever opens one
    waits for its other end, for ever.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        kind = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(kind):
            raise OSError(errno.EINVAL, "not a regular file, and it is to be read again when it changes", str(path))
        return file.read()
