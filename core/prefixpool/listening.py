"""Addresses on which programs listen, and by which they are reached from the same machine.

`::` is everything that a machine has: IPv6 and IPv4 by one socket, or IPv4 alone where the kernel has no IPv6. Event loops
would make it IPv6 alone, hence sockets of our own.
"""

from __future__ import annotations

import os
import socket
from typing import Final

EVERYWHERE: Final = "::"
_EVERYWHERE_IPV4: Final = "0.0.0.0"  # a name for it
_LOOPBACK: Final = "127.0.0.1"


def available(host: str) -> str:
    """The same, but 0.0.0.0 for `::` where the kernel has no IPv6."""
    if host != EVERYWHERE:
        return host
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind((EVERYWHERE, 0))
    except OSError:
        return _EVERYWHERE_IPV4
    return host


def bound(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A socket with this address, not listening yet. `shared`: other processes may have it, too. Raises OSError."""
    found = socket.getaddrinfo(available(host), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, host != EVERYWHERE)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"{in_url(host)}:{port}: {os.strerror(error.errno or 0)}") from error
    return sock


def reachable(host: str) -> str:
    """As in a URL: where a program on the same machine reaches a listener at this address."""
    return _LOOPBACK if host in (_EVERYWHERE_IPV4, EVERYWHERE, "") else in_url(host)


def in_url(host: str) -> str:
    """Addresses of IPv6 stand in brackets there."""
    return f"[{host}]" if ":" in host else host
