"""Addresses on which programs listen, and by which they are reached from the same machine.

`::`, or nothing, is everything that a machine has: IPv6 and IPv4 by one socket, or IPv4 alone where the kernel has no IPv6.
Event loops would make it IPv6 alone, hence sockets of our own. A name may stand for several addresses: a socket for each.
"""

from __future__ import annotations

import errno
import os
import socket
from contextlib import ExitStack
from typing import Any, Final

EVERYWHERE: Final = "::"
_EVERYWHERE_IPV4: Final = "0.0.0.0"  # a name for it
_LOOPBACK: Final = "127.0.0.1"
_NOT_HERE: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_DRAWS: Final = 10  # of any free port, until one is free on all addresses

_Address = tuple[int, tuple[Any, ...]]  # family, and what the system calls take


def available(host: str) -> str:
    """The same, but `::` for nothing, and 0.0.0.0 for either where the kernel has no IPv6."""
    if host not in (EVERYWHERE, ""):
        return host
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind((EVERYWHERE, 0))
    except OSError:
        return _EVERYWHERE_IPV4
    return EVERYWHERE


def bound(host: str, port: int, *, shared: bool = False) -> list[socket.socket]:
    """Sockets that do not listen yet, all with one port: as many as the host has addresses, at least one. Raises OSError.

    Addresses of a name that this machine does not have (IPv6 where it is switched off) are left out, unless all are.
    `shared`: other processes may have them, too.
    """
    chosen = available(host)
    try:
        addresses = _addresses(chosen)
        for _ in range(_DRAWS if port == 0 and len(addresses) > 1 else 0):
            try:
                return _bound(addresses, port, shared=shared)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:  # else the port that the first was given is another's elsewhere
                    raise
        return _bound(addresses, port, shared=shared)
    except socket.gaierror as error:
        raise OSError(error.errno, f"{in_url(host)}:{port}: {error.strerror}") from error
    except OSError as error:
        raise OSError(error.errno, f"{in_url(host)}:{port}: {os.strerror(error.errno or 0)}") from error


def _addresses(host: str) -> list[_Address]:
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError as error:  # no name can be so: `a..b`, or labels of more than 63 characters
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known") from error
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _bound(addresses: list[_Address], port: int, *, shared: bool) -> list[socket.socket]:
    with ExitStack() as undo:
        sockets: list[socket.socket] = []
        missing: OSError | None = None
        for family, address in addresses:
            try:
                one = undo.enter_context(_bound_one(family, (address[0], port, *address[2:]), shared=shared))
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                missing = error
                continue
            sockets.append(one)
            port = one.getsockname()[1]
        if missing is not None and not sockets:
            raise missing
        undo.pop_all()
        return sockets


def _bound_one(family: int, address: tuple[Any, ...], *, shared: bool) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, address[0] != EVERYWHERE)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def reachable(host: str) -> str:
    """As in a URL: where a program on the same machine reaches a listener at this address."""
    return _LOOPBACK if host in (_EVERYWHERE_IPV4, EVERYWHERE, "") else in_url(host)


def in_url(host: str) -> str:
    """Addresses of IPv6 stand in brackets there."""
    return f"[{host}]" if ":" in host else host
