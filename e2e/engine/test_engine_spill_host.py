"""Host memory below the device, on real vLLM: what is restored is what was computed, bit by bit.

Like is compared with like: a device hit and a restore compute the same tokens. A cold request computes the prompt in other
pieces, which changes bf16 rounding; its greedy tokens are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from prefixpool_testing.spill_engine import BLOCK, CHUNK_BYTES, Fault, Said, SpillEngine, side_by_side, spill_engine

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

HOST = ("--host-kv-bytes", str(200 * CHUNK_BYTES))
PROMPT = 10 * BLOCK + 1


@pytest.fixture(scope="module")
def engines(model: str) -> Iterator[list[SpillEngine]]:
    with side_by_side(spill_engine(model, *HOST), spill_engine(model, *HOST, faulty=True)) as both:
        yield both


@pytest.fixture(scope="module")
def engine(engines: list[SpillEngine]) -> SpillEngine:
    return engines[0]


@pytest.fixture(scope="module")
def faulty(engines: list[SpillEngine]) -> SpillEngine:
    """One that is wrong when told to be."""
    return engines[1]


def three_ways(engine: SpillEngine, seed: str) -> tuple[Said, Said, Said]:
    """The same prompt cold, from the device, and from host memory."""
    prompt = engine.prompt(seed, PROMPT)
    cold, device = engine.say(prompt), engine.say(prompt)
    engine.reset()
    return cold, device, engine.say(prompt)


@pytest.mark.parametrize("seed", ["one", "two", "three"])
def test_restore_from_host_memory_is_bit_for_bit_a_device_hit(engine: SpillEngine, seed: str) -> None:
    before = engine.cached_from("host")
    cold, device, host = three_ways(engine, seed)
    assert (cold.cached, device.cached, host.cached) == (0, PROMPT - 1, PROMPT - 1)
    assert engine.cached_from("host") == before + PROMPT - 1
    assert (host.ids, host.logprobs) == (device.ids, device.logprobs)
    assert host.agrees(cold)


def test_a_reply_is_restored_too(engine: SpillEngine) -> None:
    prompt = engine.prompt("reply", PROMPT)
    first = engine.say(prompt, tokens=3 * BLOCK)
    engine.reset()
    assert engine.say([*prompt, *first.ids]).cached >= PROMPT - 1 + 2 * BLOCK


def test_another_tenant_finds_nothing_in_host_memory__peers_63(engine: SpillEngine) -> None:
    prompt = engine.prompt("salted", PROMPT)
    engine.say(prompt, cache_salt="alpha")
    engine.reset()
    assert engine.say(prompt, cache_salt="beta").cached == 0
    engine.reset()
    assert engine.say(prompt, cache_salt="alpha").cached == PROMPT - 1


def test_preempted_requests_are_answered_right__peers_55(engine: SpillEngine) -> None:
    """Four at once get all blocks of the device, and need more at their thirty-second token."""
    prompts = [engine.prompt(f"preempted {i}", 23 * BLOCK + 1) for i in range(4)]
    alone = [engine.say(prompt, tokens=64) for prompt in prompts]
    engine.reset()
    before = engine.preemptions()
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda prompt: engine.say(prompt, tokens=64), prompts))
    assert engine.preemptions() > before
    assert all(one.agrees(other) for one, other in zip(together, alone, strict=True))


@pytest.mark.parametrize("fault", [Fault.NOTHING_COPIED, Fault.ROTATED])
def test_load_that_is_wrong_is_noticed(faulty: SpillEngine, fault: Fault) -> None:
    """The control: the comparison depends on what is loaded."""
    faulty.fail(Fault.NONE)
    _, device, host = three_ways(faulty, f"without {fault}")
    assert (host.ids, host.logprobs, host.cached) == (device.ids, device.logprobs, device.cached)
    faulty.fail(fault)
    faulty.say(faulty.prompt(f"other bytes for the blocks that are loaded into, {fault}", 20 * BLOCK + 1))
    _, device, host = three_ways(faulty, fault)
    assert host.cached == device.cached
    assert host.logprobs != device.logprobs
