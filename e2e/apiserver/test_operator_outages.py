"""An API server that goes away, and a network that does worse: the operator converges when it is back, by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prefixpool_testing.cluster.api_server import ApiServer
from prefixpool_testing.eventually import eventually
from prefixpool_testing.operated import Place
from prefixpool_testing.operator_program import ACCOUNT, NAMESPACE, OperatorProgram, install
from prefixpool_testing.tcp_link import Link

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Long terms: what is tested here is that the process itself lives through it.
FLAGS = ("--resync-s", "5", "--api-timeout-s", "3", "--lease-duration-s", "60", "--lease-renew-s", "50")


@asynccontextmanager
async def operator_behind_a_link(api: ApiServer, tmp_path: Path, lease: str) -> AsyncIterator[tuple[OperatorProgram, Link]]:
    """The link carries TLS unread; its address is in the server's certificate."""
    async with Link(api.url) as link:
        own = api.kubeconfig_of(ACCOUNT, NAMESPACE).read_text()
        kubeconfig = tmp_path / "kubeconfig"
        kubeconfig.write_text(own.replace(api.url, link.url.replace("http://", "https://")))
        operator = OperatorProgram(api, lease, *FLAGS, "--lease-name", lease, kubeconfig=kubeconfig)
        operator.start()
        try:
            await operator.until_leading()
            yield operator, link
        finally:
            operator.stop()


async def test_the_api_server_restarts(api: ApiServer, place: Place) -> None:
    operator = OperatorProgram(api, "restarts", *FLAGS, "--lease-name", "restarts")
    operator.start()
    await operator.until_leading()
    await place.apply("p")
    await place.serve("p", replicas=2)
    api.kill()
    await asyncio.sleep(3)
    api.start()
    await place.apply("p", replicas=3)
    await place.serve("p", replicas=3)
    assert operator.exit_status() is None
    operator.stop()


async def test_connections_are_cut_again_and_again_while_a_pool_comes_up(
    api: ApiServer, place: Place, tmp_path: Path
) -> None:
    async with operator_behind_a_link(api, tmp_path, "cuts") as (operator, link):
        for number in range(5):
            await place.apply(f"p{number}", replicas=1)
            link.cut()
            await link.heal()
            await asyncio.sleep(0.3)
        for number in range(5):
            await place.serve(f"p{number}", replicas=1)
        assert operator.exit_status() is None


async def test_watches_that_fall_silent_without_an_end(api: ApiServer, place: Place, tmp_path: Path) -> None:
    """Nothing is refused, nothing arrives: only deadlines help, and the resync finds what was missed."""
    async with operator_behind_a_link(api, tmp_path, "silence") as (operator, link):
        await place.apply("p")
        await place.serve("p", replicas=2)
        link.freeze()
        await place.apply("p", replicas=3)
        await asyncio.sleep(4)
        link.cut()
        await link.heal()
        await place.serve("p", replicas=3)
        assert operator.exit_status() is None


async def test_a_crd_that_comes_after_the_operator(api: ApiServer, place: Place) -> None:
    """It waits, says so, and works as soon as the kind is there."""
    name = "crd/inferencepools.prefixpool.dev"
    await place.kubectl("delete", name, "--wait=true")
    operator = OperatorProgram(api, "early", *FLAGS, "--lease-name", "early")
    operator.start()

    async def says() -> bool:
        return "pools could not be listed" in operator.log

    try:
        await eventually(says, within_s=60, what="it says that there is no such kind")
        await asyncio.to_thread(install, api)
        await operator.until_leading()
        await place.apply("p", replicas=1)
        await place.serve("p", replicas=1)
    finally:
        operator.stop()
