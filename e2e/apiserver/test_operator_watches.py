"""Watches that end for good reasons: the operator lists anew and watches on. No resync is near that could heal it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prefixpool_testing.api_proxy import ApiProxy, Gone
from prefixpool_testing.cluster.api_server import ApiServer
from prefixpool_testing.eventually import eventually
from prefixpool_testing.operated import POOLS, Place
from prefixpool_testing.operator_program import ACCOUNT, NAMESPACE, OperatorProgram, install

pytestmark = pytest.mark.asyncio(loop_scope="module")

POOLS_PATH = "/apis/prefixpool.dev/v1alpha1/inferencepools"
NO_RESYNC = ("--resync-s", "3600")


@asynccontextmanager
async def running(api: ApiServer, name: str, kubeconfig: Path | None = None) -> AsyncIterator[OperatorProgram]:
    operator = OperatorProgram(api, name, *NO_RESYNC, "--lease-name", name, kubeconfig=kubeconfig)
    operator.start()
    try:
        await operator.until_leading()
        yield operator
    except BaseException as error:
        error.add_note(f"the operator's last words:\n{operator.tail}")
        raise
    finally:
        await asyncio.to_thread(operator.stop)  # its last request may go through a proxy in this loop


@pytest.mark.parametrize("way", Gone)
async def test_watches_whose_place_in_time_is_gone(api: ApiServer, place: Place, tmp_path: Path, way: Gone) -> None:
    """410, as an API server says whose etcd was compacted while the watch was away."""
    async with ApiProxy(api.url, api.folder / "pki/ca.crt") as proxy:
        own = api.kubeconfig_of(ACCOUNT, NAMESPACE).read_text()
        kubeconfig = tmp_path / "kubeconfig"
        kubeconfig.write_text(own.replace(api.url, proxy.url))
        async with running(api, f"gone-{way.value}", kubeconfig) as operator:
            await place.apply("p")
            await place.serve("p", replicas=2)
            assert POOLS_PATH in proxy.watched
            before = await operator.figure("watch_restarts_total")  # the CRD may be too new for discovery
            proxy.expire(way)

            async def told() -> bool:
                return POOLS_PATH in proxy.refused and (way is Gone.STATUS or proxy.refused.keys() >= proxy.watched)

            await eventually(told, within_s=30, what="watches are refused")
            await place.apply("p", replicas=3)
            await place.apply("q", replicas=1)
            await place.serve("p", replicas=3)
            await place.serve("q", replicas=1)
            restarts = await operator.figure("watch_restarts_total") - before
            assert (restarts > 0) is (way is Gone.STATUS)
            assert operator.exit_status() is None


async def test_pools_were_seen_by_resync_only_once_their_crd_had_been_deleted(api: ApiServer, place: Place) -> None:
    async with running(api, "crd") as operator:
        await place.apply("p", replicas=1)
        await place.serve("p", replicas=1)
        await place.kubectl("delete", f"crd/{POOLS}", "--wait=true")

        async def noticed() -> bool:
            return await operator.figure("watch_restarts_total") > 0

        await eventually(noticed, within_s=60, what="the watch has ended")
        await asyncio.to_thread(install, api)
        await place.apply("q", replicas=1)
        await place.serve("q", replicas=1)
        assert operator.exit_status() is None
