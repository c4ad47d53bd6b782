"""Debian's packages. Servers are only unpacked into the cache: installing them would start them on the machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from prefixpool_testing.cluster import cache
from prefixpool_testing.cluster.errors import ClusterError

_TIMEOUT_S: Final = 600.0
_PACKAGES: Final = {  # command: package
    "openssl": "openssl",
    "setpriv": "util-linux",
    "ip": "iproute2",
    "iptables": "iptables",
    "ipset": "ipset",
    "conntrack": "conntrack",
    "mmdebstrap": "mmdebstrap",
    "buildah": "buildah",
}


def unpacked(package: str) -> Path:
    """The files of one package, in the cache. What it depends on must be on the machine."""
    return cache.built(cache.folder() / "debian" / package, lambda place: _unpack(package, place))


def installed(*commands: str) -> None:
    """Installs what is missing."""
    missing = sorted({_PACKAGES[command] for command in commands if shutil.which(command) is None})
    if not missing:
        return
    hint = f"apt-get update && apt-get install -y {' '.join(missing)}"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise ClusterError(f"missing on this machine: {', '.join(missing)}; as root on Debian: {hint}")
    with cache.locked(cache.folder() / "apt.lock"):
        print(f"installing {', '.join(missing)} ...", flush=True)
        _apt(("install", "-y", "--no-install-recommends", *missing), hint)


def _unpack(package: str, place: Path) -> None:
    hint = f"as root: apt-get update; then: apt-get download {package}"
    if shutil.which("apt-get") is None:
        raise ClusterError(f"{package} comes from Debian's packages, and apt-get is not on this machine")
    print(f"fetching Debian's {package} ...", flush=True)
    _apt(("download", package), hint, place)
    (file,) = place.glob("*.deb")
    subprocess.run(["dpkg", "-x", file, place], check=True, timeout=_TIMEOUT_S)
    file.unlink()


def _apt(arguments: Sequence[str], hint: str, folder: Path | None = None) -> None:
    """Tried again with fresh package lists, which a new machine lacks."""
    if _run(arguments, folder).returncode == 0:
        return
    if os.geteuid() == 0:
        _run(("update",), folder)
    again = _run(arguments, folder)
    if again.returncode != 0:
        raise ClusterError(f"apt-get {' '.join(arguments)} failed ({hint}):\n{again.stdout[-2000:]}")


def _run(arguments: Sequence[str], folder: Path | None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["apt-get", "-qq", *arguments],
        cwd=folder,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
