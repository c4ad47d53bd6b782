"""Single prompts of the demo of tiers, against a fake engine that keeps what it is told in three tiers."""

from collections import Counter
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console

from prefixpool_cli.demo.spill.figures import TierTokens
from prefixpool_cli.demo.spill.probing import PROMPTS, ROUNDS, Prober
from prefixpool_cli.demo.spill.ttft import Probe, Way
from prefixpool_cli.display import ArmDisplay
from prefixpool_cli.local_pool import LocalPool

BLOCK = 32


class FakeEngine:
    """Router and engine in one. What is computed comes to disk with the next request."""

    def __init__(self) -> None:
        self.tiers: dict[str, set[tuple[int, ...]]] = {"device": set(), "host": set(), "disk": set()}
        self.cached: Counter[str] = Counter()
        self.written = 0
        self.unwritten = 0
        self.app = web.Application()
        self.app.router.add_post("/tokenize", self.tokenize)
        self.app.router.add_post("/v1/completions", self.complete)
        self.app.router.add_post("/reset_prefix_cache", self.reset)
        self.app.router.add_get("/metrics", self.metrics)

    async def tokenize(self, request: web.Request) -> web.Response:
        words = (await request.json())["prompt"].split()
        return web.json_response({"tokens": [hash(word) % 50_000 for word in words]})

    async def complete(self, request: web.Request) -> web.Response:
        prompt = tuple((await request.json())["prompt"])
        self.written, self.unwritten = self.written + self.unwritten, 0
        if len(prompt) <= BLOCK:
            return web.json_response({})
        found = next((tier for tier, held in self.tiers.items() if prompt in held), "")
        if found:
            self.cached[found] += len(prompt) - 1
        else:
            self.unwritten = len(prompt) // BLOCK
        for held in self.tiers.values():
            held.add(prompt)
        return web.json_response({})

    async def reset(self, request: web.Request) -> web.Response:
        self.tiers["device"].clear()
        if request.query["reset_external"] == "true":
            self.tiers["host"].clear()
        return web.json_response({})

    async def metrics(self, request: web.Request) -> web.Response:
        counts = {"host": self.cached["host"], "disk": self.cached["disk"]}
        lines = [f'vllm:prompt_tokens_cached_by_source_total{{source="{tier}"}} {count}' for tier, count in counts.items()]
        lines.append(f"vllm:prompt_tokens_cached_total {self.cached.total()}")
        lines.append(f'prefixpool:disk_events_total{{event="written"}} {self.written}')
        return web.Response(text="\n".join(lines) + "\n")


@pytest.fixture
async def probes() -> AsyncIterator[list[Probe]]:
    engine = FakeEngine()
    async with TestServer(engine.app) as server, aiohttp.ClientSession() as http:
        url = str(server.make_url("")).rstrip("/")
        replica = SimpleNamespace(engine_url=url)
        spec = SimpleNamespace(model_name="m", block_tokens=BLOCK)
        pool: Any = SimpleNamespace(replicas={"r-0": replica}, router_url=url, engine_key="k", spec=spec)
        bars = ArmDisplay(Console(quiet=True))
        yield await Prober(cast(LocalPool, pool), http, bars, seed=1).run()


async def test_every_prompt_is_timed_cold_and_then_from_each_tier(probes: list[Probe]) -> None:
    counts = Counter((probe.prompt_tokens, probe.way) for probe in probes)
    assert {length for length, _ in counts} == {1025, 4097}
    for length in (1025, 4097):
        assert counts[length, Way.COLD] == PROMPTS
        assert {counts[length, way] for way in Way if way is not Way.COLD} == {PROMPTS * ROUNDS}


async def test_tiers_above_the_wanted_one_are_emptied_first(probes: list[Probe]) -> None:
    assert [probe for probe in probes if probe.is_stray] == []
    assert {probe.tokens for probe in probes if probe.way is Way.DISK and probe.prompt_tokens == 1025} == {
        TierTokens(disk=1024)
    }
