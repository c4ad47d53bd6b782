"""Kubernetes' own programs, CoreDNS, Helm and who enforces NetworkPolicies: built from the Go modules in e2e/cluster/go.

They are kept in the user's cache.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Final, NamedTuple

from prefixpool_testing.cluster import cache, phases
from prefixpool_testing.cluster.errors import ClusterError

MODULES: Final = Path(__file__).parents[2] / "cluster" / "go"
_BUILD_S: Final = 1800.0
# Compilers collect garbage less, and nothing is told to debuggers, who are never asked: a quarter of what building computes.
_COMPILER: Final = "-gcflags=all=-dwarf=false"
_GO: Final = {"CGO_ENABLED": "0", "GOFLAGS": "", "GOWORK": "off", "GOTOOLCHAIN": "local", "GOGC": "800"}
# What is tested meanwhile goes first. Linux weighs sessions against each other, whatever the niceness of processes in them
# (sched(7), autogroup), so a build has a session of its own; it ends with its starter, as it would in the same session.
_NICE: Final = '{ echo 15 >/proc/self/autogroup; } 2>/dev/null; exec nice -n 15 "$@"'
_ASIDE: Final = ("setpriv", "--pdeathsig", "KILL", "--", "sh", "-c", _NICE, "sh")


class _Group(NamedTuple):
    """Programs that are built together; `module` gives the version."""

    folder: str
    module: str
    packages: tuple[str, ...]
    version_variables: tuple[str, ...] = ()


_KUBERNETES: Final = ("k8s.io/component-base/version.gitVersion", "k8s.io/client-go/pkg/version.gitVersion")
GROUPS: Final = {
    "api": _Group(
        "kubernetes",
        "k8s.io/kubernetes",
        tuple(f"k8s.io/kubernetes/cmd/{name}" for name in ("kube-apiserver", "kube-controller-manager", "kubectl")),
        _KUBERNETES,
    ),
    "node": _Group(
        "kubernetes",
        "k8s.io/kubernetes",
        tuple(f"k8s.io/kubernetes/cmd/{name}" for name in ("kube-scheduler", "kubelet", "kube-proxy")),
        _KUBERNETES,
    ),
    "network": _Group("network", "github.com/coredns/coredns", ("./coredns", "./netpol")),
    "helm": _Group(
        "helm",
        "helm.sh/helm/v3",
        ("helm.sh/helm/v3/cmd/helm",),
        ("helm.sh/helm/v3/internal/version.version",),
    ),
}


def tool(name: str) -> Path:
    """The program `name`; builds it and its companions when the cache lacks them."""
    for key, group in GROUPS.items():
        if any(package.rpartition("/")[2] == name for package in group.packages):
            return cache.built(_place(key, group), lambda place: _build(key, group, place)) / name  # noqa: B023
    raise ClusterError(f"no Go module of e2e/cluster/go makes {name!r}")


def build(*groups: str) -> None:
    """Some of `GROUPS`, or all: everything that `make e2e` needs."""
    for name in groups or GROUPS:
        tool(GROUPS[name].packages[0].rpartition("/")[2])


def _version(group: _Group) -> str:
    """Of the pinned module: the one place that says it is its go.mod."""
    text = (MODULES / group.folder / "go.mod").read_text()
    found = re.search(rf"^\s*{re.escape(group.module)} (v\S+)", text, re.MULTILINE)
    assert found is not None, f"{group.module} is not in the go.mod of {group.folder}"
    return found[1]


def _place(key: str, group: _Group) -> Path:
    """Named after what it is made of: another go.mod is another place."""
    folder = MODULES / group.folder
    pins = b"".join(path.read_bytes() for path in (folder / "go.mod", folder / "go.sum", *sorted(folder.glob("*/*.go"))))
    return cache.folder() / f"{group.folder}-{_version(group)}-{hashlib.sha256(pins).hexdigest()[:8]}" / key


def _build(key: str, group: _Group, place: Path) -> None:
    go = _go(MODULES / group.folder)
    version = _version(group)
    names = ", ".join(package.rpartition("/")[2] for package in group.packages)
    print(f"building {names} {version} (once; minutes) ...", flush=True)
    started_s = time.monotonic()
    variables = " ".join(f"-X {name}={version}" for name in group.version_variables)
    flags = ("-mod=readonly", "-trimpath", "-buildvcs=false", _COMPILER, "-ldflags", f"-s -w {variables}", "-o", f"{place}/")
    done = subprocess.run(
        [*_ASIDE, go, "build", *flags, *group.packages],
        cwd=MODULES / group.folder,
        env={**os.environ, **_GO},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_BUILD_S,
        check=False,
    )
    if done.returncode != 0:
        raise ClusterError(f"go build of {names} in e2e/cluster/go/{group.folder} failed:\n{done.stdout[-3000:]}")
    took_s = time.monotonic() - started_s
    phases.note(f"  {names}: built", took_s)
    print(f"built {names} in {took_s:.0f} s", flush=True)


def _go(module: Path) -> str:
    """The Go on PATH, if it is new enough for a module."""
    asked = re.search(r"^go (\d+)\.(\d+)", (module / "go.mod").read_text(), re.MULTILINE)
    assert asked is not None
    wanted = f"Go {asked[1]}.{asked[2]} or newer is needed to build {module.name}"
    go = shutil.which("go")
    if go is None:
        raise ClusterError(f"{wanted}, and no `go` is on PATH (Debian's own is too old)")
    said = subprocess.run([go, "env", "GOVERSION"], capture_output=True, text=True, timeout=60, check=True).stdout.strip()
    found = re.match(r"go(\d+)\.(\d+)", said)
    if found is None or (int(found[1]), int(found[2])) < (int(asked[1]), int(asked[2])):
        raise ClusterError(f"{wanted}; {go} is {said}")
    return go
