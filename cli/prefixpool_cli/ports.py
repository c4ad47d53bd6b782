"""Ports of this machine: whether one is free, and claims on those that a program will have later.

Engines listen a minute after their port was chosen, and again after a death. Until then looking is not enough: pools that
start at once may choose the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from random import Random
from typing import Final

from prefixpool.listening import bound
from prefixpool_cli.claims import Claims
from prefixpool_cli.errors import PoolError

FIRST_PORT: Final = 20_000
FEWEST_PORTS: Final = 1_000
EPHEMERAL: Final = 32_768  # where Linux begins to give ports away, unless told otherwise


@contextmanager
def claimed_ports(count: int) -> Iterator[list[int]]:
    """As `claim_ports`, on loopback, until the end. Raises PoolError."""
    with Claims() as claims:
        yield claim_ports(claims, count)


def claim_ports(claims: Claims, count: int, host: str = "127.0.0.1") -> list[int]:
    """Different ports that nobody has or has claimed, below those that the kernel gives to whoever asks for any.

    So nobody's outgoing connection takes one before its program listens, or while that program is started again.
    Raises PoolError if there are not so many.
    """
    ports = list(_port_range())
    Random().shuffle(ports)  # not seeded: pools that start at once seldom try the same
    found = list(islice((port for port in ports if _claim_if_free(claims, port, host)), count))
    if len(found) < count:
        raise PoolError(f"only {len(found)} of {count} ports are free on {host}", "end pools that nobody uses")
    return found


def claim_port(claims: Claims, port: int) -> bool:
    """A certain port, whether a stranger has it or not; False if a pool has claimed it."""
    return claims.take(port_claim(port))


def port_claim(port: int) -> str:
    """The name of a claim."""
    return f"port-{port}"


def _claim_if_free(claims: Claims, port: int, host: str) -> bool:
    """First the claim, then the look: whoever has the claim may look in peace."""
    if not claims.take(port_claim(port)):
        return False
    if port_is_free(host, port):
        return True
    claims.release(port_claim(port))
    return False


def _port_range(setting: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> range:
    try:
        ephemeral = int(setting.read_text().split()[0])
    except OSError:
        ephemeral = EPHEMERAL
    first = ephemeral if ephemeral >= FIRST_PORT + FEWEST_PORTS else EPHEMERAL
    return range(FIRST_PORT, first)


def port_is_free(host: str, port: int) -> bool:
    """Whether a listener could have the port now, on all addresses of the host."""
    try:
        sockets = bound(host, port)
    except OSError:
        return False
    for sock in sockets:
        sock.close()
    return True


def is_local(host: str) -> bool:
    """Whether a listener could have this address, or one that this name stands for."""
    return port_is_free(host, 0)
