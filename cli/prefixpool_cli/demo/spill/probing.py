"""Times single prompts through a running pool's router, with nothing else in flight; tiers are emptied between them."""

from __future__ import annotations

import time
from random import Random
from typing import Any, Final

import aiohttp

from prefixpool_cli.demo import text
from prefixpool_cli.demo.client import ChatClient
from prefixpool_cli.demo.spill import counters, figures
from prefixpool_cli.demo.spill.plan import LENGTHS, TIMES
from prefixpool_cli.demo.spill.ttft import Probe, Way
from prefixpool_cli.display import ArmDisplay
from prefixpool_cli.errors import CliError
from prefixpool_cli.local_pool import LocalPool

PROMPTS: Final = 3  # of each length, nobody else's
ROUNDS: Final = 3  # of device, host and disk for each of them
WARM: Final = (
    Way.DEVICE,
    Way.HOST,
    Way.DISK,
)  # in this order a restore leaves on the device what the next round wants there
WRITTEN_S: Final = 120.0  # until a prompt has come to disk
COMPLETIONS: Final = "/v1/completions"
SENTENCE_TOKENS: Final = 8  # at least


class Prober:
    """One pass over one replica. `seed`: of the prompts' text."""

    def __init__(self, pool: LocalPool, http: aiohttp.ClientSession, bars: ArmDisplay, seed: int) -> None:
        self._pool = pool
        self._http = http
        self._bars = bars
        self._draw = Random(seed)
        self._name = next(iter(pool.replicas))
        self._router = ChatClient(http, pool.router_url, pool.spec.model_name)
        self._engine = ChatClient(http, pool.replicas[self._name].engine_url, pool.spec.model_name, pool.engine_key)

    async def run(self) -> list[Probe]:
        """Raises CliError or RequestFailedError."""
        self._bars.begin(TIMES.name, (1 + len(LENGTHS) * PROMPTS) * (1 + len(WARM) * ROUNDS))
        await self._ways(min(LENGTHS))  # not judged: the first steps of an engine are slow
        return [probe for _ in range(PROMPTS) for length in LENGTHS for probe in await self._ways(length)]

    async def _ways(self, length: int) -> list[Probe]:
        prompt = await self._prompt(length)
        written = (await self._counters()).written_chunks
        probes = [await self._probe(prompt, Way.COLD)]
        await self._until_written(written + length // self._pool.spec.block_tokens)
        for way in WARM * ROUNDS:
            await self._empty(way)
            probes.append(await self._probe(prompt, way))
        return probes

    async def _prompt(self, length: int) -> list[int]:
        """So many token ids of a new text."""
        words = text.paragraph(self._draw, length // SENTENCE_TOKENS)
        tokens: list[int] = (await self._engine.post("/tokenize", {"prompt": words}))["tokens"]
        return tokens[:length]

    async def _probe(self, prompt: list[int], way: Way) -> Probe:
        before = figures.tier_tokens([(await self._counters()).load])
        began_s = time.monotonic()
        await self._say(prompt)
        seconds = time.monotonic() - began_s
        after = figures.tier_tokens([(await self._counters()).load])
        self._bars.advance(TIMES.name, f"{len(prompt)} tokens, {way}: {1000 * seconds:,.0f} ms")
        return Probe(len(prompt), way, seconds, after - before)

    async def _say(self, prompt: list[int]) -> None:
        """One token of answer, so that all of it is the first."""
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
        await self._router.post(COMPLETIONS, body)

    async def _empty(self, way: Way) -> None:
        """All tiers above the one that is wanted."""
        if way is not Way.DEVICE:
            whole = str(way is Way.DISK).lower()
            await self._engine.post(f"/reset_prefix_cache?reset_external={whole}", {})

    async def _until_written(self, chunks: int) -> None:
        deadline = time.monotonic() + WRITTEN_S
        while (found := (await self._counters()).written_chunks) < chunks:
            if time.monotonic() > deadline:
                raise CliError(f"only {found} of {chunks} chunks came to disk within {WRITTEN_S:.0f} s")
            await self._engine.post(COMPLETIONS, {"prompt": [1], "max_tokens": 1})  # an idle engine's counters stand still

    async def _counters(self) -> counters.Counters:
        return await counters.read(self._http, self._pool, self._name)
