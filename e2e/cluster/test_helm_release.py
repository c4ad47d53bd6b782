"""The chart by the `helm` program, on a cluster whose pods run: the guide's commands, upgrade, uninstall, install again."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from prefixpool_cli.ports import claimed_ports
from prefixpool_testing import chart
from prefixpool_testing.cluster import images
from prefixpool_testing.cluster.node import Node
from prefixpool_testing.cluster.product import PoolPlace, install
from prefixpool_testing.cluster.removals import Removals
from prefixpool_testing.cluster.toolchain import tool
from prefixpool_testing.traffic import traffic

ROOT = Path(__file__).parents[2]
POOLS = "inferencepools.prefixpool.dev"


class Shell:
    """A terminal in this checkout, with `helm` and `kubectl`, whose current namespace is `namespace`."""

    def __init__(self, cluster: Node, namespace: str) -> None:
        config = json.loads(cluster.api.kubectl("config", "view", "--raw", "-o", "json"))
        config["contexts"][0]["context"]["namespace"] = namespace
        kubeconfig = cluster.folder / f"{namespace}.shell.kubeconfig"
        kubeconfig.write_text(json.dumps(config))
        path = ":".join([*(str(tool(name).parent) for name in ("helm", "kubectl")), os.environ["PATH"]])
        own = {"KUBECONFIG": str(kubeconfig), "PATH": path, "HOME": str(cluster.folder / "home")}
        self._environment = {**os.environ, **own}

    async def run(self, command: str) -> str:
        """What it prints; what it leaves running in the background is ended. Raises AssertionError if it fails."""
        with tempfile.TemporaryFile("w+") as said:  # not a pipe, which the background would keep open
            process = await asyncio.create_subprocess_exec(
                *("bash", "-ec", command), cwd=ROOT, env=self._environment, stdout=said, stderr=said, start_new_session=True
            )
            try:
                async with asyncio.timeout(400):
                    status = await process.wait()
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            said.seek(0)
            text = said.read()
        assert status == 0, f"{command}\n{text}"
        return text

    async def helm(self, command: str, *arguments: str) -> str:
        return await self.run(" ".join(["helm", command, chart.RELEASE, *arguments, "--namespace", chart.NAMESPACE]))


@pytest_asyncio.fixture
async def bare(cluster: Node, removals: Removals) -> AsyncIterator[Node]:
    """Without the product, which comes back at the end; images have the names that the chart has for them."""
    for name, repository in ((images.CONTROL, "control"), (images.WORKER, "worker")):
        cluster.ctr("images", "tag", "--force", name, f"docker.io/prefixpool/{repository}:0.1.0")
    removals.until_done()  # the kind goes with the chart
    remove(cluster)
    yield cluster
    removals.until_done()
    await Shell(cluster, "default").helm("uninstall", "--ignore-not-found")
    remove(cluster)
    install(cluster)


def remove(cluster: Node) -> None:
    """All that the chart makes, and all pools."""
    objects = json.dumps({"apiVersion": "v1", "kind": "List", "items": chart.objects()})
    cluster.api.kubectl("delete", "--ignore-not-found", "--timeout=100s", "-f", "-", stdin=objects)


def guide() -> list[str]:
    """The commands of the first code block in docs/install.md."""
    block = re.search(r"\n\n((?:    .*\n)+)", (ROOT / "docs/install.md").read_text())
    assert block
    return re.split(r"\n(?=\S)", re.sub(r"^    ", "", block[1], flags=re.MULTILINE).strip())


@pytest.mark.alone
async def test_a_release_from_install_to_install_again(bare: Node, place: PoolPlace) -> None:
    shell = Shell(bare, place.namespace)
    install_it, apply_it, ask_it = guide()
    began = time.monotonic()
    await shell.run(install_it)
    await shell.run(apply_it)
    with claimed_ports(1) as (port,):
        answer = await shell.run(ask_it.replace("8000", str(port)))
    print(f"\nfrom `helm install` to the first answer: {time.monotonic() - began:.0f} s")
    assert '"choices"' in answer
    assert "Succeeded" in await shell.helm("test")

    await place.until_ready("sim", 2)
    pods, restarts = await uids(place), await place.restarts("sim")
    client = await place.client_of("sim")
    async with traffic([client, client]) as seen:
        await seen.more(10)
        values = "--set replicas=3 --set podAnnotations.upgraded=yes"
        await shell.helm("upgrade", "charts/prefixpool", "--reset-then-reuse-values", "--wait", values)
        await seen.more(10)
        assert f"[CustomResourceDefinition] {POOLS}" in await shell.helm("uninstall", "--wait")
        await seen.more(10)
        await shell.run(install_it)
        await seen.more(10)
    assert not seen.failures
    assert (await uids(place), await place.restarts("sim")) == (pods, restarts)

    await place.kubectl("scale", f"{POOLS}/sim", "--replicas=3")
    await place.until_ready("sim", 3)


async def uids(place: PoolPlace) -> dict[str, Any]:
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in await place.workers("sim")}
