"""What engines count of their tiers, read from their own `/metrics`."""

from __future__ import annotations

from typing import Final, NamedTuple

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from prefixpool_agent.engines.metrics import EngineLoad, parse_load
from prefixpool_cli.demo.client import RequestFailedError
from prefixpool_cli.local_pool import LocalPool

METRICS_S: Final = 10.0
DISK_EVENTS: Final = "prefixpool:disk_events_total"


class Counters(NamedTuple):
    """Since the engine's start."""

    load: EngineLoad
    written_chunks: int  # to disk


def parse(text: str) -> Counters:
    """Raises ValueError if it is no exposition; what is missing counts as 0."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    written = [s.value for s in samples if s.name == DISK_EVENTS and s.labels.get("event") == "written"]
    return Counters(parse_load(text), int(sum(written)))


async def read(http: aiohttp.ClientSession, pool: LocalPool, replica: str) -> Counters:
    """Of one engine of a pool. Raises RequestFailedError."""
    url = pool.replicas[replica].engine_url + "/metrics"
    headers = {"authorization": f"Bearer {pool.engine_key}"}
    try:
        async with http.get(url, headers=headers, timeout=aiohttp.ClientTimeout(total=METRICS_S)) as answer:
            answer.raise_for_status()
            return parse(await answer.text())
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise RequestFailedError(f"{replica}: /metrics: {type(error).__name__}: {error}") from error
