"""The `vllm:*` metrics that agents, routers and people read (research: vllm.md 6, and a scrape of vLLM 0.32)."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from prefixpool_agent.sim.below import Below
from prefixpool_agent.sim.tier_metrics import LoadMetrics, TierCollector

FINISH_REASONS: Final = ("stop", "length", "abort", "error", "repetition")
_LABELS: Final = ("model_name", "engine")
_SECONDS: Final = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
)
_TOKENS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class SimMetrics:
    """Counters change as things happen; gauges are set by whoever owns the figure, at scrape time."""

    def __init__(
        self, registry: CollectorRegistry, *, model: str, block_tokens: int, blocks: int, max_model_len: int
    ) -> None:
        self.registry = registry
        self._values = {"model_name": model, "engine": "0"}
        self.running = self._gauge("num_requests_running", "Number of requests in model execution batches.")
        self.waiting = self._gauge("num_requests_waiting", "Number of requests waiting to be processed.")
        self.kv_usage = self._gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.")
        self.preemptions = self._counter("num_preemptions", "Cumulative number of preemption from the engine.")
        self.prompt_tokens = self._counter("prompt_tokens", "Number of prefill tokens processed.")
        self.generation_tokens = self._counter("generation_tokens", "Number of generation tokens processed.")
        self.queries = self._counter("prefix_cache_queries", "Prefix cache queries, in tokens.")
        self.hits = self._counter("prefix_cache_hits", "Prefix cache hits, in tokens.")
        self.external_queries = self._counter("external_prefix_cache_queries", "Queries of lower tiers, in tokens.")
        self.external_hits = self._counter("external_prefix_cache_hits", "Hits of lower tiers, in tokens.")
        self.cached_tokens = self._counter("prompt_tokens_cached", "Number of cached prompt tokens (local + external).")
        by_source = self._labelled("prompt_tokens_by_source", "Number of prompt tokens by source.", "source")
        self.computed = self._child(by_source, source="local_compute")
        self.cache_hit = self._child(by_source, source="local_cache_hit")
        self.transferred = self._child(by_source, source="external_kv_transfer")
        tiers = self._labelled("prompt_tokens_cached_by_source", "Prefix-cache hit tokens by tier.", "source")
        self.cached_device = self._child(tiers, source="device")
        self.cached_host = self._child(tiers, source="host")
        self.cached_disk = self._child(tiers, source="disk")
        for source in ("p2p", "external_unspecified"):
            self._child(tiers, source=source)
        success = self._labelled("request_success", "Count of successfully processed requests.", "finished_reason")
        self.success = {reason: self._child(success, finished_reason=reason) for reason in FINISH_REASONS}
        waiting = self._labelled_gauge("num_requests_waiting_by_reason", "Number of waiting requests by reason.", "reason")
        self.waiting_capacity = waiting.labels(**self._values, reason="capacity")
        waiting.labels(**self._values, reason="deferred").set(0)
        self.ttft = self._histogram("time_to_first_token_seconds", "Time to first token in seconds.", _SECONDS)
        self.inter_token = self._histogram("inter_token_latency_seconds", "Inter-token latency in seconds.", _SECONDS)
        self.e2e = self._histogram("e2e_request_latency_seconds", "End to end request latency in seconds.", _SECONDS)
        self.queue_time = self._histogram("request_queue_time_seconds", "Time spent in WAITING phase.", _SECONDS)
        self.prefill_time = self._histogram("request_prefill_time_seconds", "Time spent in PREFILL phase.", _SECONDS)
        self.iteration_tokens = self._histogram("iteration_tokens_total", "Tokens per engine step.", _TOKENS)
        self.prefill_computed = self._histogram("request_prefill_kv_computed_tokens", "New KV tokens of a prefill.", _TOKENS)
        self._cache_config(block_tokens, blocks, max_model_len)

    def with_tiers(self, below: Below, block_tokens: int) -> LoadMetrics:
        """There are tiers below the device. To be called once."""
        self.registry.register(TierCollector(below, self._values, block_tokens))
        return LoadMetrics(self.registry, self._values)

    def _cache_config(self, block_tokens: int, blocks: int, max_model_len: int) -> None:
        info = {
            "engine": "0",
            "block_size": str(block_tokens),
            "num_gpu_blocks": str(blocks),
            "num_gpu_blocks_override": str(blocks),
            "kv_cache_size_tokens": str(blocks * block_tokens),
            "kv_cache_max_concurrency": str(blocks * block_tokens / max_model_len),
            "prefix_caching_hash_algo": "sha256",
            "cache_dtype": "auto",
            "enable_prefix_caching": "True",
            "user_specified_block_size": "True",
        }
        gauge = Gauge(
            "vllm:cache_config_info", "Information of the LLMEngine CacheConfig", list(info), registry=self.registry
        )
        gauge.labels(**info).set(1)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"vllm:{name}", text, _LABELS, registry=self.registry).labels(**self._values)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"vllm:{name}", text, _LABELS, registry=self.registry).labels(**self._values)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"vllm:{name}", text, _LABELS, registry=self.registry, buckets=buckets).labels(**self._values)

    def _labelled(self, name: str, text: str, label: str) -> Counter:
        return Counter(f"vllm:{name}", text, (*_LABELS, label), registry=self.registry)

    def _labelled_gauge(self, name: str, text: str, label: str) -> Gauge:
        return Gauge(f"vllm:{name}", text, (*_LABELS, label), registry=self.registry)

    def _child(self, counter: Counter, **labels: str) -> Counter:
        return counter.labels(**self._values, **labels)
