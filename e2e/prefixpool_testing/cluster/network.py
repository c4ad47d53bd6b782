"""Addresses and names of a node, by the slot of the machine that it takes: nodes in different slots share none of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import Final

from prefixpool_testing.cluster import cache

# Set aside for tests of networks (RFC 2544): routed nowhere. A quarter of it for each node.
_SET_ASIDE: Final = IPv4Network("198.18.0.0/15")
_QUARTERS: Final = tuple(_SET_ASIDE.subnets(new_prefix=17))
SLOTS: Final = len(_QUARTERS)


@dataclass(frozen=True)
class Network:
    """What one node takes of the machine. The machine reaches all of `whole` by `link`, and is `machine_address` there."""

    slot: int
    whole: str  # networks as address/bits
    services: str
    pods: str
    machine_address: str
    node_address: str
    link: str
    cgroup: str


def network_of(slot: int) -> Network:
    """Of the node in a slot, 0 to SLOTS - 1."""
    whole = _QUARTERS[slot]
    cable, *_ = whole.subnets(new_prefix=30)
    parts = list(whole.subnets(new_prefix=20))
    return Network(
        slot=slot,
        whole=str(whole),
        services=str(parts[6]),
        pods=str(next(parts[7].subnets(new_prefix=24))),
        machine_address=str(cable[1]),
        node_address=str(cable[2]),
        link=f"prefixpool{slot}",
        cgroup=f"prefixpool-node{slot}",
    )


def first_address(cidr: str) -> str:
    """Of a network of Services: that of the Service `kubernetes`."""
    return str(IPv4Network(cidr)[1])


@contextmanager
def free_network() -> Iterator[Network]:
    """The first that no process of this machine has. When all are taken, one is waited for."""
    for slot in range(SLOTS):
        if (owner := cache.owned(_lock(slot))) is not None:
            with owner:
                yield network_of(slot)
            return
    with cache.locked(_lock(0)):
        yield network_of(0)


def _lock(slot: int) -> Path:
    return cache.folder() / f"node-{slot}.lock"
