"""What images/Dockerfile is given: our wheel and those it depends on, by image. Downloads stop here."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from prefixpool_testing.cluster import cache
from prefixpool_testing.cluster.errors import ClusterError

ROOT: Final = Path(__file__).parents[3]
PYTHON: Final = "3.11"  # of Debian 12
_IMAGES: Final = {"control": ("operator", "router"), "worker": ("agent",)}
_STEP_S: Final = 600.0


def make(target: Path) -> None:
    """`target` becomes the build context: control/, worker/ and prefixpool/ with wheels."""
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch)
        _run(_uv(), "build", "-q", "--wheel", "-o", str(fresh / "prefixpool"), str(ROOT))
        (fresh / "prefixpool/.gitignore").unlink(missing_ok=True)
        for image, extras in _IMAGES.items():
            chosen = [f"--extra={extra}" for extra in extras]
            names = str(fresh / f"{image}.txt")
            _run(
                _uv(),
                "pip",
                "compile",
                "-q",
                *chosen,
                f"--python-version={PYTHON}",
                "-o",
                names,
                str(ROOT / "pyproject.toml"),
            )
            kinds = (f"--python-version={PYTHON}", "--only-binary=:all:", "--no-deps")
            _run(_uv(), "tool", "run", "-q", "pip", "download", "-q", *kinds, "-r", names, "-d", str(fresh / image))
            Path(names).unlink()
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(fresh, target)


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
