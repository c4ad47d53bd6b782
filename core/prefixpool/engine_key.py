"""The file with a pool's engine keys, one a line: engines and agents accept each, all others send the first.

So a key is replaced without a gap: the new one is put behind the old one, later before it, and the old one goes at last.
"""

from __future__ import annotations

from pathlib import Path

from prefixpool.errors import SettingsError


def accepted(content: bytes) -> tuple[bytes, ...]:
    """Every key; () if there is none."""
    return tuple(line.strip() for line in content.splitlines() if line.strip())


def sent(content: bytes) -> str:
    """The key to send. Raises SettingsError if there is none, or none that could stand in a header."""
    keys = accepted(content)
    if not keys:
        raise SettingsError("no engine key in it")
    try:
        key = keys[0].decode("ascii")
    except UnicodeDecodeError as error:
        raise SettingsError("an engine key is of ASCII characters") from error
    if not key.isprintable():
        raise SettingsError("an engine key is of printable characters")
    return key


def read(path: str | Path) -> bytes:
    """The file's content. Raises SettingsError that names the file."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SettingsError(f"engine key file {path}: {error.strerror}") from error


def read_sent(path: str | Path) -> str:
    """The key to send, from a file. Raises SettingsError that names the file."""
    content = read(path)
    try:
        return sent(content)
    except SettingsError as error:
        raise SettingsError(f"engine key file {path}: {error}") from error
