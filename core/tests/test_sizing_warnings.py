"""Warnings beside a plan: tiers that are too small for what they are there for, and containers too small for the plan."""

import pytest
from msgspec.structs import replace

from prefixpool.api.sizing import known_device, known_shape, sizing_request
from prefixpool.api.spec import PoolSpec
from prefixpool.sizing import catalogue
from prefixpool.sizing.plan import SizingRequest, corrected, plan
from prefixpool.sizing.tiers import HostLimits, HostNeeds
from prefixpool.sizing.warning import Hazard, of_limits, of_use, sentences

GIB = 1 << 30
TOKEN = 131_072  # bytes of KV
NEEDS = HostNeeds(memory=20 * GIB, shared_memory=4 * GIB)


def request(**more: object) -> SizingRequest:
    made = SizingRequest(
        shape=catalogue.model("llama-3.1-8b"), accelerator=catalogue.accelerator("h100"), max_model_len=32_768
    )
    return replace(made, **more)


def hazards(**more: object) -> list[Hazard]:
    return [warning.hazard for warning in plan(request(**more)).warnings]


def test_a_plan_without_tiers_warns_of_nothing() -> None:
    assert hazards() == []


@pytest.mark.parametrize(("tokens", "warns"), [(2 * 32_768 - 16, True), (2 * 32_768, False)])
def test_host_pool_must_hold_two_of_the_longest_prompts(tokens: int, warns: bool) -> None:
    found = hazards(host_bytes=tokens * TOKEN, kv_bytes=33_000 * TOKEN)
    assert (Hazard.HOST_POOL_SMALL in found) is warns


def test_small_host_pool_is_told_in_bytes() -> None:
    (warning,) = plan(request(host_bytes=4 * GIB)).warnings
    assert "4.0 GiB is smaller than 2 of the longest prompts (8.0 GiB)" in warning.message


def test_a_host_pool_without_room_for_one_block_was_left_out_without_a_word() -> None:
    (warning,) = plan(request(host_bytes=1 << 20)).warnings
    assert warning.hazard is Hazard.HOST_POOL_SMALL
    assert "The host pool of 1 MiB holds not one block" in warning.message


def test_host_pool_that_only_copies_the_device_adds_nothing() -> None:
    device = plan(request()).device_per_replica
    assert hazards(host_bytes=device.bytes) == [Hazard.HOST_POOL_BELOW_DEVICE]
    assert hazards(host_bytes=device.bytes + 16 * TOKEN) == []


def test_disk_that_only_copies_the_host_pool_adds_nothing() -> None:
    device = plan(request()).device_per_replica
    assert hazards(host_bytes=2 * device.bytes, disk_bytes=2 * device.bytes) == [Hazard.DISK_BELOW_HOST]
    assert hazards(host_bytes=2 * device.bytes, disk_bytes=4 * device.bytes) == []


def test_engine_with_more_blocks_than_planned_is_warned_of_anew() -> None:
    asked = request(host_bytes=plan(request()).device_per_replica.bytes + 16 * TOKEN)
    planned = plan(asked)
    assert planned.warnings == ()
    measured = corrected(planned, asked, planned.device_per_replica.blocks + 10)
    assert [warning.hazard for warning in measured.warnings] == [Hazard.HOST_POOL_BELOW_DEVICE]


def test_container_that_gets_less_than_is_planned_is_warned_of() -> None:
    limits = HostLimits(memory=19 * GIB, shared_memory=3 * GIB)
    memory, shared = of_limits(NEEDS, limits, "pool-0")
    assert (memory.hazard, shared.hazard) == (Hazard.MEMORY_LIMIT, Hazard.SHARED_MEMORY)
    assert "pool-0 may use 19.0 GiB of memory, and 20.0 GiB are planned" in memory.message
    assert "pool-0 has 3.0 GiB of /dev/shm, and 4.0 GiB are planned" in shared.message


@pytest.mark.parametrize("limits", [HostLimits(), HostLimits(memory=20 * GIB - 4095, shared_memory=4 * GIB)])
def test_container_without_limits_or_with_enough_is_not(limits: HostLimits) -> None:
    assert of_limits(NEEDS, limits, "pool-0") == ()


def test_nearly_used_up_limit_is_told_in_words_that_stay() -> None:
    assert of_use(100, 94, "pool-0") == of_use(0, 94, "pool-0") == ()
    assert of_use(100, 95, "pool-0") == of_use(100, 99, "pool-0") != ()
    assert sentences(of_use(GIB, GIB, "pool-0")) == (
        "Warning: pool-0 has used more than 95 % of its memory limit (1.0 GiB): raise it, or lower kvCache."
    )


@pytest.mark.parametrize(
    ("resources", "warns"),
    [
        ({"limits": {"memory": "8Gi"}}, True),
        ({"requests": {"memory": "8Gi"}}, True),
        ({"limits": {"memory": "800Gi"}}, False),
        ({"limits": {"cpu": "8"}}, False),
    ],
)
def test_limit_that_a_pools_spec_sets_is_compared_with_the_plan(resources: dict[str, dict[str, str]], warns: bool) -> None:
    spec = PoolSpec.from_object(
        {
            "metadata": {"name": "pool"},
            "spec": {
                "model": {"source": "meta-llama/Llama-3.1-8B"},
                "engine": {"resources": resources},
                "accelerator": {"memory": "80Gi"},
                "kvCache": {"host": {"memory": "200Gi"}},
            },
        }
    )
    shape, device = known_shape(spec.model, spec.engine.kind), known_device(spec.accelerator)
    assert shape is not None
    assert device is not None
    found = plan(sizing_request(spec, shape.shape, device))
    assert (Hazard.MEMORY_LIMIT in [warning.hazard for warning in found.warnings]) is warns
