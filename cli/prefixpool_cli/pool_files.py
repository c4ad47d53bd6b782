"""Files and ports of a local pool: a private run directory with a short path, the engine key, free ports."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Final

from prefixpool import names
from prefixpool.listening import available
from prefixpool_cli.errors import PoolError

FIRST_PORT: Final = 20_000
FEWEST_PORTS: Final = 1_000
EPHEMERAL: Final = 32_768  # where Linux begins to give ports away, unless told otherwise
SOCKET_PATH_BYTES: Final = 107  # sun_path of Linux, without its final zero
_VLLM_NAME_BYTES: Final = 36  # vLLM names its own sockets there by UUIDs
_LONGEST_NAME: Final = max(len(names.RUN_SUPERVISOR_SOCK), len(names.RUN_KV_REPLAY), _VLLM_NAME_BYTES)


def make_run_root(parents: Sequence[str] = ()) -> Path:
    """A new directory (0700) under the first parent that is short enough for the sockets below it.

    Raises PoolError if none is.
    """
    tried = []
    for parent in parents or (tempfile.gettempdir(), "/tmp"):
        if len(os.fsencode(parent)) + len("/pp-12345678/r999/") + _LONGEST_NAME <= SOCKET_PATH_BYTES:
            return Path(tempfile.mkdtemp(prefix="pp-", dir=parent))  # mkdtemp makes it 0700
        tried.append(parent)
    raise PoolError(
        f"the directory for sockets would have too long a path: {', '.join(tried)}",
        "set TMPDIR to a directory with a short path; unix sockets allow 107 bytes",
    )


def write_private(path: Path, data: bytes) -> None:
    """Replace a file atomically, readable by its owner only."""
    part = path.with_suffix(".part")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
    part.replace(path)


def make_engine_key(path: Path) -> str:
    """A new key, known to this pool only."""
    key = secrets.token_urlsafe(32)
    write_private(path, key.encode() + b"\n")
    return key


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Different ports that were free at one moment, below those that the kernel gives to whoever asks for any.

    So nobody's outgoing connection takes one before its program listens, or while that program is started again.
    """
    ports = list(_port_range())
    Random().shuffle(ports)  # not seeded: two pools that start at once choose different ones
    return list(islice((port for port in ports if port_is_free(host, port)), count))


def _port_range(setting: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> range:
    try:
        ephemeral = int(setting.read_text().split()[0])
    except OSError:
        ephemeral = EPHEMERAL
    first = ephemeral if ephemeral >= FIRST_PORT + FEWEST_PORTS else EPHEMERAL
    return range(FIRST_PORT, first)


def port_is_free(host: str, port: int) -> bool:
    """Whether a listener could have the port now."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(available(host), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError:
        return False
    return True


def is_local(host: str) -> bool:
    """Whether a listener could have this address, or the address that this name stands for."""
    return port_is_free(host, 0)


def tail(path: Path, lines: int = 15, limit: int = 32_768) -> str:
    """The last lines of a log; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - limit))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def keep_logs(root: Path, target: Path) -> None:
    """Copy every log below the run directory, named by its place: `r0/engine.log` becomes `r0-engine.log`."""
    target.mkdir(parents=True, exist_ok=True)
    for log in root.rglob("*.log"):
        shutil.copyfile(log, target / "-".join(log.relative_to(root).parts))
