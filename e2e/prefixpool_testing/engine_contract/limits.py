"""Load that an engine tells, and what becomes of requests whose client has left."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from prefixpool_agent.engines.metrics import CacheConfig
from prefixpool_testing.engine_contract.asks import (
    APIS,
    MODEL,
    ask,
    body_of,
    exactly,
    load_of,
    quiet,
    text,
    until_load,
)
from prefixpool_testing.engine_worker import DEVICE_BLOCKS, KEY, EngineWorker
from prefixpool_testing.pool_client import COMPLETIONS, Body

ABORTED_S = 5.0  # promised within a second; a loaded machine is slower, the reply that is not written is much longer
ENDLESS = 1500  # tokens


class LimitContract:
    """Of running requests."""

    def test_metrics_tell_the_cache_that_was_allocated(self, engine_worker: EngineWorker) -> None:
        assert load_of(engine_worker).cache == CacheConfig(block_tokens=32, blocks=DEVICE_BLOCKS)

    def test_counters_count_prompt_and_cached_tokens(self, engine_worker: EngineWorker) -> None:
        body = body_of(COMPLETIONS, text("counted twice"))
        before = until_load(engine_worker, quiet)
        replies = [ask(engine_worker, COMPLETIONS, body) for _ in range(2)]
        prompt, cached = (before.prompt_tokens + sum(r.prompt for r in replies), before.cached_tokens + replies[1].cached)
        after = until_load(engine_worker, lambda load: load.prompt_tokens >= prompt)
        assert (after.prompt_tokens, after.cached_tokens) == (prompt, cached)
        assert after.preemptions == before.preemptions

    def test_running_request_is_seen_and_holds_blocks(self, engine_worker: EngineWorker) -> None:
        until_load(engine_worker, quiet)
        with sent(engine_worker, COMPLETIONS, body_of(COMPLETIONS, "Once", tokens=ENDLESS, ignore_eos=True)):
            load = until_load(engine_worker, lambda load: load.running == 1 and load.kv_usage > 0)
            assert load.waiting == 0
        until_load(engine_worker, lambda load: quiet(load) and not load.kv_usage, ABORTED_S)

    @pytest.mark.parametrize("streams", [True, False])
    @pytest.mark.parametrize("path", APIS)
    def test_client_that_leaves_stops_its_request(self, engine_worker: EngineWorker, path: str, *, streams: bool) -> None:
        until_load(engine_worker, quiet)
        since = len(engine_worker.notes.notes)
        body = body_of(path, "Count without end.", tokens=ENDLESS, ignore_eos=True, stream=streams)
        with sent(engine_worker, path, body):
            until_load(engine_worker, lambda load: load.running == 1)
        until_load(engine_worker, quiet, ABORTED_S)
        assert engine_worker.notes.exchange(since)[1].aborted

    def test_client_that_leaves_before_the_first_token_stops_its_request__peers_40(
        self, engine_worker: EngineWorker
    ) -> None:
        until_load(engine_worker, quiet)
        prompt = exactly(engine_worker, "left while it is read", 1500)
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 500, "ignore_eos": True}
        since = len(engine_worker.notes.notes)
        with sent(engine_worker, COMPLETIONS, body):
            engine_worker.notes.wait(lambda seen: len(seen) > since)
        ask(engine_worker, COMPLETIONS, body_of(COMPLETIONS, "hello", tokens=1))  # figures are new after some step
        until_load(engine_worker, quiet, ABORTED_S)
        end = engine_worker.notes.exchange(since)[1]
        assert (end.aborted, end.body) == (True, b"")


@contextmanager
def sent(worker: EngineWorker, path: str, body: Body) -> Iterator[None]:
    """A request whose client leaves at the end of the block, whatever has come by then."""
    connection = http.client.HTTPConnection("127.0.0.1", worker.port, timeout=120)
    try:
        headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        connection.request("POST", path, json.dumps(body), headers)
        yield
    finally:
        connection.close()
