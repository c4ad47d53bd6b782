"""Plans: figures, reasons, changes that fit, tiers, corrections by a running engine, bounds on speed."""

import pytest
from msgspec.structs import replace

from prefixpool.sizing import catalogue, kv, speed
from prefixpool.sizing.errors import SizingError
from prefixpool.sizing.kv import KvDtype
from prefixpool.sizing.parallel import Parallel
from prefixpool.sizing.plan import Budget, BudgetTier, LimitedBy, SizingRequest, Source, corrected, plan

GIB = 1 << 30


def request(model: str = "llama-3.1-8b", device: str = "h100", tensor: int = 1, **more: object) -> SizingRequest:
    made = SizingRequest(
        shape=catalogue.model(model), accelerator=catalogue.accelerator(device), parallel=Parallel(tensor=tensor)
    )
    return replace(made, **more)


def test_what_vllm_leaves_for_kv_on_an_h100() -> None:
    found = plan(request())
    assert found.memory.usable == found.memory.total * 92 // 100
    assert found.memory.weights == 16_060_522_496
    assert found.device_per_replica.blocks == found.memory.room // (16 * 131_072)
    assert found.device_per_replica.tokens == (found.device_per_replica.blocks - 1) * 16  # the null block holds nothing
    assert found.kv_bytes_per_token == 131_072
    assert found.replicas == 1
    assert found.source is Source.PLANNED


def test_more_kv_than_there_is_room_for_said_that_no_change_would_fit() -> None:
    found = plan(request(kv_bytes=10_000 * GIB))
    assert not found.fits
    assert found.changes == ("all that is left for KV (now 10,000.0 GiB are asked for)",)


def test_one_l4_cannot_serve_the_longest_sequence_of_llama_8b_and_the_plan_says_by_how_much() -> None:
    """vllm #2248, #28051: `No available memory for the cache blocks` and `max seq len` at start, known before a pod runs."""
    found = plan(request(device="l4"))
    assert not found.fits
    assert found.limited_by is LimitedBy.LONGEST_SEQUENCE
    assert found.short_bytes == (131_072 // 16 + 1) * 16 * 131_072 - found.memory.room
    assert "16.0 GiB on each device" in found.reason
    assert found.changes[0] == "a longest sequence of 31,744 tokens (now 131,072)"
    assert plan(request(device="l4", max_model_len=31_744)).fits
    assert not plan(request(device="l4", max_model_len=31_760)).fits


def test_weights_that_do_not_fit_name_more_devices() -> None:
    found = plan(request("llama-3.1-70b"))
    assert found.limited_by is LimitedBy.WEIGHTS
    assert found.device_per_replica.tokens == 0
    assert found.changes == ("tensor parallelism 4 (now 1)", "devices with more memory, such as mi325x")
    assert plan(request("llama-3.1-70b", tensor=4)).fits
    assert not plan(request("llama-3.1-70b", tensor=2)).fits


def test_weights_that_fit_with_nothing_beside_them_are_limited_by_overhead() -> None:
    tight = replace(catalogue.accelerator("h100"), memory=16_500_000_000)
    assert plan(request(accelerator=tight, utilisation_percent=100)).limited_by is LimitedBy.OVERHEAD


def test_deepseek_v3_on_eight_h200() -> None:
    found = plan(request("deepseek-v3", "h200", tensor=8))
    assert found.fits
    assert (
        found.weights_bytes / 8 < found.memory.weights < found.weights_bytes / 8 * 1.02
    )  # norms and MLA's down-projections
    assert found.device_per_replica.bytes == found.device_per_replica.blocks * 16 * 70_272 * 8
    assert found.kv_bytes_per_token == 8 * 70_272


def test_a_budget_of_sessions_counts_whole_sessions_in_whole_blocks() -> None:
    """LMCache's FAQ: 275,760 tokens are 6 sessions of 40,000, not 6.9."""
    found = plan(request(budget=Budget(sessions=250, tokens_per_session=40_000)))
    each = (found.device_per_replica.blocks - 1) // 2500
    assert found.sessions_per_replica == each == 11
    assert found.replicas == -(-250 // each) == 23
    assert "11 sessions of 40,000 tokens" in found.reason
    assert "23 replicas are needed" in found.reason


def test_a_budget_of_tokens() -> None:
    found = plan(request(budget=Budget(resident_tokens=1_000_000)))
    assert found.replicas == -(-1_000_000 // found.device_per_replica.tokens) == 3


def test_layers_with_windows_keep_only_their_window_of_each_session() -> None:
    """Gemma 3 27B: 10 full layers in one group; 52 with windows of 1,024 in six."""
    found = plan(request("gemma-3-27b", tensor=2, budget=Budget(sessions=100, tokens_per_session=100_000)))
    each = 100_000 // 16 + 6 * (1024 // 16 + 1)
    assert found.sessions_per_replica == (found.device_per_replica.blocks - 1) // each


def test_the_host_pool_serves_a_budget_where_it_is_the_larger_tier() -> None:
    budget = Budget(sessions=250, tokens_per_session=40_000, tier=BudgetTier.HOST)
    found = plan(request(budget=budget, host_bytes=200 * GIB))
    assert found.limited_by is LimitedBy.HOST_KV
    assert found.host_per_replica.blocks == 200 * GIB // (16 * 131_072)
    assert found.sessions_per_replica == found.host_per_replica.blocks // 2500
    small = plan(request(budget=budget, host_bytes=GIB))
    assert small.limited_by is LimitedBy.DEVICE_KV
    assert "host memory" not in small.reason


def test_host_chunks_are_rounded_up_to_pages() -> None:
    """`num_chunks = bytes // round_up(block of all ranks, 4096)`: an odd block wastes the rest of its last page."""
    model = catalogue.model("smollm2-135m")
    found = plan(replace(request(), shape=model, block_tokens=5, host_bytes=GIB, max_model_len=1000))
    block = kv.layout(model, KvDtype.AUTO, 5).block_bytes
    assert block % 4096
    assert found.host_per_replica.blocks == GIB // (-(-block // 4096) * 4096)


def test_mla_lies_once_on_host_and_disk_however_many_ranks_there_are() -> None:
    found = plan(request("deepseek-v3", "h200", tensor=8, host_bytes=100 * GIB, disk_bytes=100 * GIB))
    assert found.host_per_replica.blocks == found.disk_per_replica.blocks == 100 * GIB // 1_126_400
    split = plan(request("llama-3.1-70b", "h100", tensor=8, host_bytes=100 * GIB))
    assert split.host_per_replica.blocks == 100 * GIB // (16 * 327_680)


def test_a_pod_asks_for_its_pool_and_the_shared_memory_around_it() -> None:
    found = plan(request(host_bytes=100 * GIB)).host_needs
    assert found.shared_memory == GIB + 120 * GIB
    assert found.memory > found.shared_memory


def test_pods_had_no_room_for_the_images_that_an_engine_keeps() -> None:
    """vLLM's `--mm-processor-cache-gb` is 4 by default, and was as much as most of what a pod got."""
    assert plan(request()).host_needs.memory == (6 + 4 + 1) * GIB


def test_ranks_that_meet_in_shared_memory_had_no_more_of_it_than_one_alone() -> None:
    """As those of cards without NVLink do, where NCCL ends an engine that has too little."""
    two, eight = (plan(request("llama-3.1-70b", "h200", tensor=tensor, max_model_len=8192)).host_needs for tensor in (2, 8))
    assert (two.shared_memory, eight.shared_memory) == (2 * GIB, 8 * GIB)
    assert eight.memory - two.memory == 6 * 2 * GIB


def test_memory_grew_with_what_lies_on_disk_beyond_the_limit_of_the_pod() -> None:
    """Engine and agent know each chunk: 8 TiB of small ones ended pods that had room for none of them."""
    tiers = {"host_bytes": 100 * GIB, "disk_bytes": 8192 * GIB}
    with_disk, without = plan(request(**tiers)), plan(request(host_bytes=100 * GIB))
    assert with_disk.disk_per_replica.blocks == 8192 * GIB // (2 << 20)
    assert with_disk.host_needs.memory - without.host_needs.memory == 4_194_304 * 1600
    assert with_disk.host_needs.shared_memory == without.host_needs.shared_memory


def test_an_engine_that_reports_its_blocks_corrects_the_plan() -> None:
    asked = request(budget=Budget(resident_tokens=1_000_000))
    found = corrected(plan(asked), asked, 20_001)
    assert found.device_per_replica.tokens == 320_000
    assert found.replicas == 4
    assert found.source is Source.MEASURED
    with pytest.raises(SizingError, match="at least 2"):
        corrected(found, asked, 1)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"utilisation_percent": 0}, "1 to 100"),
        ({"utilisation_percent": 101}, "1 to 100"),
        ({"max_model_len": 200_000}, "131,072 tokens at most"),
        ({"max_model_len": -1}, "negative"),
        ({"host_bytes": -1}, "negative"),
        ({"disk_bytes": GIB}, "a disk tier needs a host tier"),
        ({"budget": Budget()}, "either resident tokens, or sessions"),
        ({"budget": Budget(resident_tokens=5, sessions=1, tokens_per_session=1)}, "either resident tokens, or sessions"),
        ({"budget": Budget(sessions=5)}, "needed together"),
        ({"budget": Budget(sessions=1, tokens_per_session=5000), "max_model_len": 4096}, "longer than the longest"),
        ({"budget": Budget(resident_tokens=5, tier=BudgetTier.HOST)}, "needs host memory"),
    ],
)
def test_requests_that_contradict_themselves_are_refused(more: dict[str, object], words: str) -> None:
    with pytest.raises(SizingError, match=words):
        plan(request(**more))


def test_decoding_is_bound_by_reading_weights_and_kv() -> None:
    """8.03 B parameters less the input table, and 8,192 tokens of KV, at 0.8 × 3.35 TB/s."""
    model, device = catalogue.model("llama-3.1-8b"), catalogue.accelerator("h100")
    read = (8_030_261_248 - 128_256 * 4096) * 2 + 8192 * 131_072
    assert speed.decode_tokens_per_s(model, device, Parallel(), KvDtype.AUTO, 8192) == pytest.approx(
        0.8 * 3.35e12 / read, rel=1e-6
    )


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3", "gemma-3-27b", "gpt-oss-120b"])
def test_at_the_break_even_loading_takes_as_long_as_computing_again(name: str) -> None:
    model, device = catalogue.model(name), catalogue.accelerator("h100")
    first, growth = speed.recompute_s_per_token(model, device, Parallel())
    starts = {"host": speed.HOST_START_S, "disk": speed.DISK_START_S}
    for found in speed.break_even(model, device, Parallel(), KvDtype.AUTO):
        assert found.tokens is not None

        def gain(tokens: int, load: float = found.load_s_per_token, start: float = starts[found.tier]) -> float:
            return first * tokens + growth * tokens**2 / 2 - start - load * tokens

        assert gain(found.tokens) >= 0 > gain(found.tokens - 1)


def test_a_slow_link_moves_the_break_even_out() -> None:
    model = catalogue.model("llama-3.1-8b")
    fast, slow = (
        speed.break_even(model, replace(catalogue.accelerator("h100"), host_link=link), Parallel(), KvDtype.AUTO)[0].tokens
        for link in (64e9, 4e9)
    )
    assert fast is not None
    assert slow is not None
    assert slow > fast


@pytest.mark.parametrize(
    ("device", "tokens", "sequences"),
    [("l4", 2048, 256), ("a100-80", 2048, 256), ("h100", 8192, 1024), ("h200", 8192, 1024), ("b200", 16384, 1024)],
)
def test_batches_are_as_large_as_vllm_makes_them_on_each_device(device: str, tokens: int, sequences: int) -> None:
    found = request(device=device).batches
    assert (found.tokens, found.sequences, found.in_flight) == (tokens, sequences, 2 * tokens)


# research/algorithms.md 4: memory (GiB), bytes of weights, of them whole on every rank (MLA's down-projections in fp8,
# expert routers in bf16), widths (model, feed-forward, vocabulary), batch (tokens, sequences), KV bytes per token and rank.
@pytest.mark.parametrize(
    ("model", "device", "ranks", "memory", "weights", "whole", "widths", "batch", "kv_bytes"),
    [
        ("llama-3.1-8b", "l4", 1, 22.5, 8_030_261_248 * 2, 0, (4096, 14336, 128_256), (2048, 256), 131_072),
        ("llama-3.1-8b", "h100", 1, 79.6, 8_030_261_248 * 2, 0, (4096, 14336, 128_256), (8192, 1024), 131_072),
        (
            "deepseek-v3", "h200", 8, 140.0, int(627.5 * GIB), 7168 * (61 * (512 + 64 + 1536) + 58 * 256 * 2),
            (7168, 18432, 129_280), (8192, 1024), 70_272,
        ),
    ],
)  # fmt: skip
def test_plans_are_those_of_the_formulas_within_a_hundredth(
    model: str, device: str, ranks: int, memory: float, weights: int, whole: int,
    widths: tuple[int, int, int], batch: tuple[int, int], kv_bytes: int,
) -> None:  # fmt: skip
    hidden, intermediate, vocabulary = widths
    on_rank = whole + (weights - whole) / ranks
    activations = 1.2 * batch[0] * (4 * hidden + 3 * intermediate / ranks) * 2 + batch[1] * vocabulary * 4 * 2 / ranks
    found = plan(request(model, device, tensor=ranks))
    divided = found.memory
    assert found.weights_bytes == pytest.approx(weights, rel=0.01)
    assert found.kv_bytes_per_token == kv_bytes * ranks
    assert divided.weights == pytest.approx(on_rank, rel=0.01)
    assert divided.activations == pytest.approx(activations, rel=0.01)
    assert 0.3 * GIB <= divided.graphs <= 1.5 * GIB
    assert 0.6 * GIB <= divided.context + 1 <= 1.5 * GIB
    room = 0.92 * memory * GIB - on_rank - activations - divided.graphs - divided.context
    assert found.device_per_replica.bytes == pytest.approx(room * ranks, rel=0.01)
    assert found.device_per_replica.tokens == pytest.approx(room / kv_bytes, rel=0.01)
