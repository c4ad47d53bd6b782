"""Files of a local pool: a private run directory with a short path, the engine key, logs."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from prefixpool import names, private_directory
from prefixpool.private_directory import PrivateDirectory
from prefixpool_cli.errors import PoolError

MIB: Final = 1 << 20
LEAST_ROOM_BYTES: Final = 4 * MIB  # logs and state of a pool that starts are a part of that
SOCKET_PATH_BYTES: Final = 107  # sun_path of Linux, without its final zero
_VLLM_NAME_BYTES: Final = 36  # vLLM names its own sockets there by UUIDs
_PREFIX: Final = "pp-"
_LONGEST_NAME: Final = max(len(names.RUN_SUPERVISOR_SOCK), len(names.RUN_KV_REPLAY), _VLLM_NAME_BYTES)


def make_run_root(parents: Sequence[str] = ()) -> PrivateDirectory:
    """A new directory under the first parent that is short enough for the sockets below it.

    Those that killed pools have left there go. Raises PoolError if none is short enough, or it is full, or read-only.
    """
    tried = []
    for parent in parents or (_temporary(), "/tmp"):
        if len(os.fsencode(parent)) + len("/pp-12345678/r999/") + _LONGEST_NAME <= SOCKET_PATH_BYTES:
            with _written(parent):
                private_directory.remove_abandoned(parent, _PREFIX)  # which may make room
                _check_room(parent)
                return private_directory.make(parent, _PREFIX)
        tried.append(parent)
    raise PoolError(
        f"the directory for sockets would have too long a path: {', '.join(tried)}",
        "set TMPDIR to a directory with a short path; unix sockets allow 107 bytes",
    )


def _temporary() -> str:
    """What TMPDIR names, or the system's. Raises PoolError."""
    try:
        return tempfile.gettempdir()
    except OSError as error:  # it tries to write
        raise PoolError(
            "no directory for temporary files can be written: TMPDIR, /tmp, /var/tmp, the current one",
            "pools keep sockets, logs and their key there; make room, or set TMPDIR to a directory that can be written",
        ) from error


def _check_room(folder: str) -> None:
    free = shutil.disk_usage(folder).free
    if free < LEAST_ROOM_BYTES:
        raise PoolError(
            f"{folder} is almost full: {free * 10 // MIB / 10} MiB are free, a pool needs {LEAST_ROOM_BYTES // MIB}",
            "make room there, or set TMPDIR to another directory: sockets, logs and the pool's key are kept in it",
        )


def write_private(path: Path, data: bytes) -> None:
    """Replace a file atomically, readable by its owner only. Raises PoolError."""
    part = path.with_suffix(".part")
    with _written(path.parent):
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        part.replace(path)


def make_run_dir(path: Path) -> None:
    """Of one replica. Raises PoolError."""
    with _written(path.parent):
        path.mkdir(mode=0o700)


def make_engine_key(path: Path) -> str:
    """A new key, known to this pool only."""
    key = secrets.token_urlsafe(32)
    write_private(path, key.encode() + b"\n")
    return key


def tail(path: Path, lines: int = 15, limit: int = 32_768) -> str:
    """The last lines of a log; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - limit))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def make_logs_folder(target: Path) -> None:
    """Raises PoolError if nothing can be written there."""
    with _keeping(target):
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target):
            pass


def keep_logs(root: Path, target: Path) -> None:
    """Copy every log below the run directory, named by its place: `r0/engine.log` becomes `r0-engine.log`.

    Raises PoolError if they cannot be written.
    """
    with _keeping(target):
        target.mkdir(parents=True, exist_ok=True)
        for log in root.rglob("*.log"):
            shutil.copyfile(log, target / "-".join(log.relative_to(root).parts))


@contextmanager
def _keeping(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PoolError(f"logs cannot be kept in {target}: {error.strerror}", "choose another folder for them") from error


@contextmanager
def _written(folder: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = "pools keep sockets, logs and their key in the directory that TMPDIR names"
        raise PoolError(f"{folder} cannot be written: {error.strerror}", hint) from error
