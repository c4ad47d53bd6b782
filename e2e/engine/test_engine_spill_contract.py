"""Every name of vLLM's that the tiers lean on. Its offloading interfaces are experimental and have moved before."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]  # importing vLLM warns of its own affairs

BASE, CPU, TIERING = "vllm.v1.kv_offload.base", "vllm.v1.kv_offload.cpu", "vllm.v1.kv_offload.tiering"
STATS = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics"
NAMES = [
    (BASE, "CanonicalKVCaches", "tensors group_data_refs"),
    (BASE, "GPULoadStoreSpec", "block_ids group_sizes block_indices"),
    (BASE, "OffloadingWorker", "submit_store submit_load get_finished wait shutdown"),
    (BASE, "TransferResult", "job_id success transfer_size transfer_time"),
    (BASE, "OffloadingEvent", "keys medium removed removal_expected"),
    (BASE, "ReqContext", "kv_transfer_params get_state set_state get_offload_key_position _offload_key_positions"),
    (BASE, "LookupResult", "HIT MISS RETRY"),
    (BASE, "Medium", "STORAGE"),
    (f"{CPU}.spec", "CPUOffloadingSpec", "get_worker blocks_per_chunk num_chunks"),
    (f"{CPU}.manager", "CPUOffloadingManager", "get_stats _num_chunks _get_num_free_chunks _policy"),
    (f"{TIERING}.manager", "TieringOffloadingManager", "get_stats primary_tier"),
    (f"{CPU}.shared_offload_region", "SharedOffloadRegion", "create_next_worker_view cleanup"),
    (f"{CPU}.policies.base", "CachePolicy", "get insert remove touch evict clear on_store_miss"),
    (f"{CPU}.policies.base", "CachePolicy", "mark_evictable mark_non_evictable on_request_finished"),
    (f"{TIERING}.spec", "TieringOffloadingSpec", "get_manager _engine_id replicated_layout cpu_page_size_per_worker"),
    (f"{TIERING}.base", "SecondaryTierManager", "lookup submit_store submit_load get_finished_jobs drain_jobs"),
    (f"{TIERING}.base", "SecondaryTierManager", "take_events get_stats touch on_new_request shutdown block_size_bytes"),
    (f"{TIERING}.base", "JobResult", "job_id success successful_keys transfer_time transfer_bytes"),
    (f"{TIERING}.base", "TransferJob", "job_id keys chunk_ids req_context"),
    (STATS, "OffloadingConnectorStats", "set_gauge increase_counter"),
]  # fmt: skip
OURS = [
    ("prefixpool_agent.tiers.specs", "HostSpec"),
    ("prefixpool_agent.tiers.specs", "HostDiskSpec"),
    ("prefixpool_agent.tiers.specs", "CudaHostSpec"),
    ("prefixpool_agent.tiers.specs", "CudaHostDiskSpec"),
    ("prefixpool_agent.tiers.disk_tier", "DiskTier"),
    ("prefixpool_agent.tiers.worth_policy", "WorthPolicy"),
]


@pytest.mark.parametrize(("module", "name", "members"), NAMES, ids=[name for _, name, _ in NAMES])
def test_vllm_still_has_what_the_tiers_lean_on(module: str, name: str, members: str) -> None:
    found = getattr(import_module(module), name, None)
    assert found is not None, f"vLLM has no {module}.{name} any more: the tiers (prefixpool_agent.tiers) must follow"
    source = inspect.getsource(found)
    for base in found.__mro__[1:]:
        if base.__module__.startswith("vllm"):
            source += inspect.getsource(base)
    gone = [member for member in members.split() if not hasattr(found, member) and member not in source]
    assert not gone, f"{module}.{name} has no {', '.join(gone)} any more: the tiers (prefixpool_agent.tiers) must follow"


@pytest.mark.parametrize(("module", "name"), OURS, ids=[name for _, name in OURS])
def test_nothing_abstract_is_left_open(module: str, name: str) -> None:
    left = getattr(import_module(module), name).__abstractmethods__
    assert not left, f"vLLM now asks {name} for {', '.join(sorted(left))}"
