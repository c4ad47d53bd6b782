"""A cache for downloads on folders of the nodes, as docs/install.md makes it, where pods may not mount such folders."""

from __future__ import annotations

import asyncio
import os
import textwrap
from pathlib import Path
from typing import Any

import yaml

from prefixpool_operator.render.container import USER_ID
from prefixpool_operator.render.volumes import CACHE
from prefixpool_testing.cluster.node import Node
from prefixpool_testing.cluster.product import PoolPlace

GUIDE = Path(__file__).parents[2] / "docs/install.md"
SOURCE = "HuggingFaceTB/SmolLM2-135M-Instruct"


async def test_replicas_share_a_folder_of_their_node(cluster: Node, place: PoolPlace) -> None:
    folder = cluster.folder / "volumes" / place.namespace
    folder.mkdir(parents=True)
    os.chown(folder, USER_ID, USER_ID)
    volume, claim = volume_of_the_guide(place.namespace, folder)
    await asyncio.to_thread(place.api.apply, volume, claim)
    try:
        await place.apply("cached", model={"source": SOURCE, "cache": {"claimName": claim["metadata"]["name"]}})
        await place.until_ready("cached", 2)
        await place.kubectl("exec", "cached-0", "-c", "worker", "--", "sh", "-c", 'echo weights > "$HF_HUB_CACHE/file"')
        assert await place.kubectl("exec", "cached-1", "-c", "worker", "--", "cat", f"{CACHE}/file") == "weights\n"
        assert (folder / "file").stat().st_uid == USER_ID
    finally:
        await place.kubectl("delete", "pv", volume["metadata"]["name"], "--wait=false")


def volume_of_the_guide(namespace: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Its commands, elsewhere."""
    text = GUIDE.read_text().partition("kubectl apply -f - <<EOF\n")[2].partition("    EOF")[0]
    volume, claim = yaml.safe_load_all(textwrap.dedent(text))
    volume["metadata"]["name"] = namespace
    volume["spec"]["hostPath"]["path"] = str(folder)
    volume["spec"]["claimRef"]["namespace"] = claim["metadata"]["namespace"] = namespace
    return volume, claim
