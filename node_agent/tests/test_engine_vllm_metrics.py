"""Reading vLLM's metrics. The samples are lines of vLLM 0.32."""

from __future__ import annotations

import pytest

from prefixpool_agent.engines.metrics import CacheConfig, EngineLoad, TierFigures, parse_load

SAMPLE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="smol"} 3.0
vllm:num_requests_waiting{engine="0",model_name="smol"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="smol",reason="capacity"} 40.0
vllm:kv_cache_usage_perc{engine="0",model_name="smol"} 0.25
vllm:num_preemptions_total{engine="0",model_name="smol"} 1.0
vllm:num_preemptions_created{engine="0",model_name="smol"} 1.79e+09
vllm:prompt_tokens_total{engine="0",model_name="smol"} 1.2345678e+07
vllm:prompt_tokens_cached_total{engine="0",model_name="smol"} 99.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="smol",source="device"} 1000.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="smol",source="host"} 300.0
vllm:prompt_tokens_cached_by_source_total{engine="0",model_name="smol",source="disk"} 100.0
vllm:kv_offload_load_time_total{engine="0",model_name="smol"} 0.4
vllm:kv_offload_tiering_read_time_total{engine="0",model_name="smol",tier="1:DiskTier"} 0.5
vllm:cache_config_info{_block_size_resolved="True",block_size="32",engine="0",num_gpu_blocks="321",x_num_gpu_blocks="7"} 1.0
"""


def test_vllms_text_is_read() -> None:
    assert parse_load(SAMPLE) == EngineLoad(
        running=3,
        waiting=2,
        kv_usage=0.25,
        preemptions=1,
        prompt_tokens=12_345_678,
        cached_tokens=99,
        host_tokens=300,
        disk_tokens=100,
        load_s=0.4,
        read_s=0.5,
        cache=CacheConfig(block_tokens=32, blocks=321),
    )


def test_the_null_block_holds_nothing() -> None:
    cache = parse_load(SAMPLE).cache
    assert cache is not None
    assert cache.usable_blocks == 320


def test_engines_of_one_server_add_up_and_the_fullest_counts() -> None:
    text = SAMPLE + 'vllm:num_requests_running{engine="1"} 4.0\nvllm:kv_cache_usage_perc{engine="1"} 0.5\n'
    load = parse_load(text)
    assert (load.running, load.kv_usage) == (7, 0.5)


def test_first_and_last_line_of_the_text_count() -> None:
    assert parse_load("vllm:num_requests_running 2").running == 2


def test_model_names_with_quotes_and_spaces_do_not_disturb() -> None:
    text = 'vllm:cache_config_info{model_name="a \\"b\\" , block_size=\\"9\\"",block_size="16",num_gpu_blocks="5"} 1.0'
    assert parse_load(text).cache == CacheConfig(block_tokens=16, blocks=5)


def test_nonsense_counts_as_nothing() -> None:
    text = "vllm:num_requests_running{} NaN\nvllm:num_requests_waiting{} +Inf\nvllm:kv_cache_usage_perc{} x\n"
    assert parse_load(text) == EngineLoad()
    assert parse_load("") == EngineLoad()
    assert parse_load('vllm:cache_config_info{block_size="None",num_gpu_blocks="None"} 1.0').cache is None


def test_bringing_a_token_back_costs_what_it_took() -> None:
    host_s, disk_s = parse_load(SAMPLE).load_s_per_token()
    assert host_s == pytest.approx(0.001)
    assert disk_s == pytest.approx(0.006), "through host memory"
    assert EngineLoad().load_s_per_token() == (0.0, 0.0)


TIERS = """\
prefixpool:host_used_bytes{engine="0",model_name="smol"} 5e+06
prefixpool:host_capacity_bytes{engine="0",model_name="smol"} 2e+07
prefixpool:host_events_total{engine="0",event="evicted_capacity",model_name="smol"} 7.0
vllm:kv_offload_allocation_failure_total{engine="0",model_name="smol"} 2.0
vllm:kv_offload_tiering_promotion_allocation_failures_total{engine="0",model_name="smol"} 0.0
prefixpool:disk_used_bytes{engine="0",model_name="smol"} 1e+09
prefixpool:disk_capacity_bytes{engine="0",model_name="smol"} 4e+09
prefixpool:disk_chunks{engine="0",model_name="smol"} 12.0
prefixpool:disk_events_total{engine="0",event="read",model_name="smol"} 4.0
prefixpool:disk_events_total{engine="0",event="read_corrupt",model_name="smol"} 1.0
vllm:kv_offload_tiering_promotion_job_failures_total{engine="0",model_name="smol",tier="1:DiskTier"} 1.0
"""


def test_tiers_below_the_device_tell_bytes_events_and_failures() -> None:
    load = parse_load(TIERS)
    assert load.host == TierFigures(5_000_000, 20_000_000, (("evicted_capacity", 7), ("write_full", 2)))
    assert load.disk == TierFigures(
        1_000_000_000, 4_000_000_000, (("promotion_failed", 1), ("read", 4), ("read_corrupt", 1))
    )
    assert parse_load(SAMPLE).disk == TierFigures()
