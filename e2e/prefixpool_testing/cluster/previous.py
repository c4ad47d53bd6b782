"""The previous release as it was installed: what its chart rendered, and what its operator made of a pool.

PYTHONPATH=e2e .venv/bin/python -m prefixpool_testing.cluster.previous COMMIT     # keeps those of a commit
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import yaml

from prefixpool_operator import kube
from prefixpool_testing import chart
from prefixpool_testing.cluster import images, product
from prefixpool_testing.cluster.api_server import api_server
from prefixpool_testing.operated import Place, operated

_ROOT: Final = Path(__file__).parents[3]
_PACKAGES: Final = ("core", "router", "node_agent", "operator", "cli", "e2e")
_RENDERED_S: Final = 600.0
FOLDER: Final = _ROOT / "e2e/cluster/previous"
POOL: Final = "kept"
_CHART: Final = FOLDER / "chart.yaml"
_STATEFUL_SET: Final = FOLDER / "statefulset.yaml"
_KEPT: Final = ("name", "labels", "annotations")
_FLAGS: Final = ("--worker-image", images.WORKER, "--router-image", images.CONTROL)


def chart_objects() -> list[Any]:
    """For a release in `chart.NAMESPACE`, with the images of the tests."""
    return list(yaml.load_all(_CHART.read_text(), yaml.CSafeLoader))


def stateful_set(pool: Any) -> Any:
    """That of a pool `POOL` with the tests' own spec, as the previous operator left it."""
    found = yaml.load(_STATEFUL_SET.read_text(), yaml.CSafeLoader)
    meta = pool["metadata"]
    owner = {"apiVersion": pool["apiVersion"], "kind": pool["kind"], "name": meta["name"], "uid": meta["uid"]}
    found["metadata"] |= {
        "namespace": meta["namespace"],
        "ownerReferences": [{**owner, "controller": True, "blockOwnerDeletion": True}],
    }
    return found


async def _keep() -> None:
    FOLDER.mkdir(exist_ok=True)
    _CHART.write_text(yaml.safe_dump_all(chart.objects(product.values())))
    with api_server() as api:
        async with operated(api, *_FLAGS) as (client, _):
            with Place(api, client) as place:
                await place.apply(POOL)
                await place.serve(POOL, 2)
                found = await client.get(kube.STATEFUL_SET, place.namespace, POOL)
    meta = {name: found["metadata"][name] for name in _KEPT}
    bare = {
        "apiVersion": kube.STATEFUL_SET.api_version,
        "kind": kube.STATEFUL_SET.kind,
        "metadata": meta,
        "spec": found["spec"],
    }
    _STATEFUL_SET.write_text(yaml.safe_dump(bare))


def _keep_those_of(commit: str) -> None:
    """By that commit's own code, in a worktree which is removed again."""
    with tempfile.TemporaryDirectory() as scratch:
        checkout = Path(scratch, "checkout")
        _git("worktree", "add", "--quiet", "--detach", str(checkout), commit)
        try:
            packages = ":".join(str(checkout / name) for name in _PACKAGES)
            program = (sys.executable, "-m", "prefixpool_testing.cluster.previous")
            subprocess.run(
                program, cwd=checkout, env={**os.environ, "PYTHONPATH": packages}, timeout=_RENDERED_S, check=True
            )
            name = _git("-C", str(checkout), "rev-parse", "--short", "HEAD").strip()
            for target in (_CHART, _STATEFUL_SET):
                target.write_text(f"# As commit {name} renders it.\n" + (checkout / target.relative_to(_ROOT)).read_text())
        finally:
            _git("worktree", "remove", "--force", str(checkout))


def _git(*arguments: str) -> str:
    argv = ("git", *arguments)
    return subprocess.run(argv, cwd=_ROOT, stdout=subprocess.PIPE, text=True, timeout=_RENDERED_S, check=True).stdout


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _keep_those_of(sys.argv[1])
    else:  # as it is called in that worktree
        asyncio.run(_keep())
