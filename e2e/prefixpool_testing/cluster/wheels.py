"""What images/Dockerfile is given: our wheel and those it depends on, by image. Downloads stop here.

Those it depends on are kept in the cache until pyproject.toml asks for others: the same files of the same age are the same
layer.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tempfile
import tomllib
from itertools import chain
from pathlib import Path
from typing import Final

from prefixpool_testing.cluster import cache
from prefixpool_testing.cluster.errors import ClusterError

ROOT: Final = Path(__file__).parents[3]
_PROJECT: Final = ROOT / "pyproject.toml"
PYTHON: Final = "3.11"  # of Debian 12
_IMAGES: Final = {"control": ("operator", "router"), "worker": ("agent",)}
_STEP_S: Final = 600.0


def make(target: Path) -> None:
    """`target` becomes the build context: control/, worker/ and prefixpool/ with wheels."""
    dependencies = cache.built(cache.folder() / "wheels" / pins(_PROJECT.read_text()), _download)
    with tempfile.TemporaryDirectory() as scratch:
        own = Path(scratch)
        _run(_uv(), "build", "-q", "--wheel", "-o", str(own), str(ROOT))
        (own / ".gitignore").unlink(missing_ok=True)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(dependencies, target)
        shutil.copytree(own, target / "prefixpool")


def pins(project: str) -> str:
    """Of what a pyproject.toml asks for, and how it is had."""
    found = tomllib.loads(project)["project"]
    extras = {extra: found["optional-dependencies"][extra] for extra in chain(*_IMAGES.values())}
    asked = json.dumps((found["dependencies"], extras)).encode()
    return hashlib.sha256(asked + Path(__file__).read_bytes()).hexdigest()[:16]


def _download(place: Path) -> None:
    """Those of all images, by image."""
    for image, extras in _IMAGES.items():
        chosen = [f"--extra={extra}" for extra in extras]
        names = place / f"{image}.txt"
        _run(_uv(), "pip", "compile", "-q", *chosen, f"--python-version={PYTHON}", "-o", str(names), str(_PROJECT))
        kinds = (f"--python-version={PYTHON}", "--only-binary=:all:", "--no-deps")
        _run(_uv(), "tool", "run", "-q", "pip", "download", "-q", *kinds, "-r", str(names), "-d", str(place / image))
        names.unlink()


def _uv() -> str:
    """That of the Makefile, or any other."""
    own = max(cache.folder().parent.glob("uv-*/bin/uv"), default=None)
    found = str(own) if own else shutil.which("uv")
    if found is None:
        raise ClusterError("uv is missing: `make setup` brings it")
    return found


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_STEP_S, check=False)
    if done.returncode:
        raise ClusterError(f"{' '.join(argv)} failed:\n{done.stdout}{done.stderr}")
