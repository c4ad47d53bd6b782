"""A network, a mount and a process namespace for a node: what it mounts, routes, filters or forks ends with them.

The machine reaches the node, its pods and its Services by one route. Nothing inside reaches further.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from prefixpool_testing.cluster.errors import ClusterError
from prefixpool_testing.cluster.network import Network
from prefixpool_testing.cluster.programs import Programs

_STEP_S: Final = 30.0
# Process 1 ignores SIGCHLD, so that the kernel reaps orphans.
_HOLDER: Final = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc")
_HOLD: Final = ("sh", "-c", "trap '' CHLD; exec sleep infinity")
_HIDDEN: Final = ("/run", "/var/lib/cni", "/var/lib/kubelet", "/var/log/containers")  # the node's own, empty at first
# A kubelet insists on these values, and would set them for the whole machine.
_KERNEL: Final = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1_000_000,
    "kernel/keys/root_maxbytes": 25_000_000,
}


@contextmanager
def namespaces(folder: Path, network: Network) -> Iterator[tuple[str, ...]]:
    """What to put before a command so that it runs inside. At the end everything inside is killed."""
    holder = Programs(folder / "logs")
    holder.start("namespaces", [*_HOLDER, *_HOLD])
    try:
        holder.until("namespaces", lambda: _inner(holder) is not None, _STEP_S)
        inside = str(_inner(holder))
        enter = ("nsenter", "--target", inside, "--net", "--mount", "--pid", "--")
        _private_files(enter, folder)
        _connect(enter, inside, network)
        yield enter
    finally:
        holder.stop_all()
        _disconnect(network)


def _inner(holder: Programs) -> int | None:
    """Process 1 of the node once it holds the node, as the machine numbers it."""
    (outer,) = holder.pids()
    children = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()
    if not children or os.readlink(f"/proc/{children[0]}/exe").rpartition("/")[2] != "sleep":
        return None
    return int(children[0])


def _private_files(enter: tuple[str, ...], folder: Path) -> None:
    """Mounts of the node's own over what it would write."""
    steps = ["mount --make-rshared /"]
    for hidden in _HIDDEN:
        Path(hidden).mkdir(parents=True, exist_ok=True)
        steps.append(f"mount -t tmpfs tmpfs {hidden}")
    steps.append("mkdir /run/netns")
    for number, (name, value) in enumerate(_KERNEL.items()):
        stand_in = folder / f"kernel-{number}"
        stand_in.write_text(f"{value}\n")
        steps.append(f"mount --bind {shlex.quote(str(stand_in))} /proc/sys/{name}")
    _run(*enter, "sh", "-ec", "\n".join(steps))


def _connect(enter: tuple[str, ...], inside: str, network: Network) -> None:
    """One cable between machine and node, and a route through it."""
    _disconnect(network)
    _run("ip", "link", "add", network.link, "type", "veth", "peer", "name", "eth0", "netns", inside)
    _run("ip", "address", "add", f"{network.machine_address}/30", "dev", network.link)
    _run("ip", "link", "set", network.link, "up")
    steps = (
        "ip link set lo up",
        f"ip address add {network.node_address}/30 dev eth0",
        "ip link set eth0 up",
        f"ip route add default via {network.machine_address}",  # programs look for one; the machine forwards nothing
        "echo 1 > /proc/sys/net/ipv4/ip_forward",
    )
    _run(*enter, "sh", "-ec", "\n".join(steps))
    _run("ip", "route", "add", network.whole, "via", network.node_address)


def _disconnect(network: Network) -> None:
    """A network whose last connections still time out outlives the node, and would keep the cable for minutes."""
    subprocess.run(["ip", "link", "delete", network.link], capture_output=True, timeout=_STEP_S, check=False)


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_STEP_S, check=False)
    if done.returncode:
        raise ClusterError(f"{shlex.join(argv)} failed with {done.returncode}: {done.stderr.strip()}")
