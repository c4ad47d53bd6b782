"""The project's images without a registry: images/Dockerfile, built by buildah on a Debian made from packages.

One archive holds them all. It is made again when anything that goes into it changes; unchanged layers come from the cache.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final

from prefixpool_testing.cluster import cache, debian, phases, wheels
from prefixpool_testing.cluster.errors import ClusterError

PAUSE: Final = "localhost/prefixpool-test/pause:1"
CONTROL: Final = "localhost/prefixpool-test/control:1"
WORKER: Final = "localhost/prefixpool-test/worker:1"
_BASE: Final = "localhost/prefixpool-test/base:1"
_SUITE: Final = "bookworm"
_PACKAGES: Final = "python3,python3-venv,ca-certificates"
_UNUSED: Final = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/info/*")
_DOCKERFILES: Final = wheels.ROOT / "images"
_STEP_S: Final = 1200.0
_KEPT_S: Final = 86400.0


def archive() -> Path:
    """The OCI archive of PAUSE, CONTROL and WORKER. Needs root."""
    debian.installed("mmdebstrap", "buildah")
    base = cache.built(cache.folder() / f"debian-{_SUITE}", _make_debian)
    with tempfile.TemporaryDirectory() as scratch:
        context = Path(scratch, "wheels")
        wheels.make(context)
        folder = cache.folder() / "images"
        place = folder / _digest(context, base)
        cache.built(place, lambda fresh: _build(base, context, fresh))
    cache.forget_unused(place, _KEPT_S)
    return place / "images.tar"


def _make_debian(place: Path) -> None:
    print("making a Debian from packages (once) ...", flush=True)
    left_out = [f"--dpkgopt=path-exclude={pattern}" for pattern in _UNUSED]
    tar = str(place / "debian.tar")
    _run("mmdebstrap", "--quiet", "--variant=minbase", f"--include={_PACKAGES}", *left_out, _SUITE, tar)


def _digest(context: Path, base: Path) -> str:
    """Of all that goes in; the Debian counts by when it was made."""
    files = [*_DOCKERFILES.glob("*Dockerfile"), *(path for path in context.rglob("*") if path.is_file())]
    parts = [f"{base.stat().st_mtime_ns}".encode(), *(path.name.encode() + path.read_bytes() for path in sorted(files))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _build(base: Path, context: Path, place: Path) -> None:
    print("building images ...", flush=True)
    layout = place / "layout"
    with phases.phase("  images: built"):
        _make_layout(base, context, layout)
        _run("tar", "-C", str(layout), "-cf", str(place / "images.tar"), ".")
    shutil.rmtree(layout)


def _make_layout(base: Path, context: Path, layout: Path) -> None:
    """An OCI layout of all images."""
    for target, name in (("base", _BASE), ("pause", PAUSE)):
        _bud("test.Dockerfile", target, name, base)
    for target, name in (("control", CONTROL), ("worker", WORKER)):
        _bud("Dockerfile", target, name, context, f"--build-arg=BASE={_BASE}")
    for name in (PAUSE, CONTROL, WORKER):
        _buildah("push", "-q", "--disable-compression", name, f"oci:{layout}:{name}")
    _name_images(layout / "index.json")


def _name_images(index: Path) -> None:
    """By the annotation that containerd's import looks for."""
    found: dict[str, Any] = json.loads(index.read_bytes())
    for image in found["manifests"]:
        notes = image["annotations"]
        notes["io.containerd.image.name"] = notes["org.opencontainers.image.ref.name"]
    index.write_text(json.dumps(found))


def _bud(dockerfile: str, target: str, name: str, context: Path, *more: str) -> None:
    chosen = ("--target", target, "-t", name, "-f", str(_DOCKERFILES / dockerfile), "--pull-never", *more)
    _buildah("bud", "-q", "--layers", "--isolation=chroot", *chosen, str(context))


def _buildah(command: str, *arguments: str) -> None:
    storage = cache.folder() / "buildah"
    folders = ("--root", str(storage / "root"), "--runroot", str(storage / "run"))
    _run("buildah", *folders, command, *arguments)


def _run(*argv: str) -> None:
    done = subprocess.run(["nice", "-n", "15", *argv], capture_output=True, text=True, timeout=_STEP_S, check=False)
    if done.returncode:
        raise ClusterError(f"{' '.join(argv)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
