"""Clusters whose pods have addresses of IPv6 first: `::` is listened on, members are told by such addresses."""

from __future__ import annotations

from pathlib import Path

import aiohttp

from prefixpool.api.engine import EngineKind
from prefixpool_cli.local_pool import LocalPool
from prefixpool_cli.pool_spec import MemberRow, PoolSpec
from prefixpool_testing.router_program import router_program

SPEC = PoolSpec(
    model="sim",
    engine=EngineKind.SIM,
    replicas=1,
    host="::1",
    engine_args="--time-scale 0",
    env={"PREFIXPOOL_WORKER_HOST": "::"},
)
BODY = {"model": "sim", "prompt": "What is a tide gauge?", "max_tokens": 2}


async def answered(url: str) -> int:
    async with aiohttp.ClientSession() as http, http.post(f"{url}/v1/completions", json=BODY) as answer:
        await answer.read()
        return answer.status


async def test_a_pool_of_ipv6_addresses(tmp_path: Path) -> None:
    async with LocalPool(SPEC) as pool:
        await pool.start()
        assert pool.router_url.startswith("http://[::1]:")
        assert await answered(pool.router_url) == 200
        (replica,) = pool.replicas.values()
        row = MemberRow(replica.name, by_ipv6(replica.engine_url), by_ipv6(replica.agent_url))
        flags = ("--host", "::", "--admin-host", "::", "--engine-key-file", str(pool.root / "engine.key"))
        async with router_program(tmp_path, [row], *flags) as router:
            await router.until(replica.name, usable=True, mode="precise", within_s=20)
            view = await router.view(replica.name)
            assert view is not None
            assert view.engine.startswith("http://[::1]:")
            for url in (router.client.url, by_ipv6(router.client.url)):
                assert await answered(url) == 200


def by_ipv6(url: str) -> str:
    return url.replace("127.0.0.1", "[::1]")
