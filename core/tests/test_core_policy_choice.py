"""Single decisions of every policy: what is chosen, why, and with which numbers."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from prefixpool.errors import SettingsError
from prefixpool.levels import Level
from prefixpool.policy import Candidate, Candidates, Policy, Query, Reason, named, policies
from prefixpool.policy.prefix import Limits
from prefixpool.ring import bound
from prefixpool.wire import Costs

ALL = tuple(policies())
KEY = 0x9E3779B97F4A7C15
MEASURED = Costs(
    prefill_s_per_token=1e-4,
    prefill_s_per_token2=1e-9,
    decode_step_s=0.01,
    decode_step_s_per_sequence=1e-4,
    output_tokens=100.0,
)


def fleet(count: int = 3, **inflight: int) -> Candidates:
    candidates = Candidates([Candidate(f"p{i}", bit=1 << 3 * i, device_tokens=100_000) for i in range(count)])
    for name, load in inflight.items():
        candidates.update(name, inflight=load)
    return candidates


def query(*levels: Level, tokens: int = 10_000, key: int = KEY, **more: float) -> Query:
    return Query(levels, tokens, key, int(more.get("session", 0)), more.get("draw", 0.5), int(more.get("turn", 0)))


def on(tokens: int, *columns: int, device: bool = True) -> Level:
    bits = sum(1 << 3 * column for column in columns)
    return Level(tokens, bits if device else 0, bits, bits)


def owners(candidates: Candidates, key: int = KEY) -> list[str]:
    return list(candidates.ring.walk(key))


@pytest.fixture
def prefix() -> Policy:
    return named("prefix")


# -- all policies


def test_policies_are_found_by_name_and_an_unknown_name_is_told_the_known_ones() -> None:
    assert ALL == ("prefix", "chwbl", "least_load", "round_robin", "random", "session")
    assert all(named(name).name == name for name in ALL)
    with pytest.raises(SettingsError, match=r"'prefx'.*prefix, chwbl, least_load, round_robin, random, session"):
        named("prefx")


@pytest.mark.parametrize("policy", ALL)
@given(
    seed=st.integers(0, 2**32),
    members=st.integers(1, 40),
    tokens=st.integers(0, 50_000),
    levels=st.integers(0, 4),
    key=st.booleans(),
)
def test_any_query_gets_a_member_and_no_more_tokens_than_it_has(
    policy: str, seed: int, members: int, tokens: int, levels: int, key: bool
) -> None:
    draw = random.Random(seed)
    candidates = fleet(members)
    for name in list(candidates.loads):
        candidates.update(name, inflight=draw.randrange(40), pending_tokens=draw.randrange(9000), trust=draw.random())
    held, found, depth = candidates.mask, list[Level](), 0
    for _ in range(levels):
        depth += draw.randrange(1, 20_000)
        held &= draw.getrandbits(3 * members) | draw.getrandbits(3 * members)
        host = held & draw.getrandbits(3 * members)
        found.append(Level(depth, host & draw.getrandbits(3 * members), host, held))
    asked = Query(found, tokens, KEY if key else 0, draw.getrandbits(2), draw.random(), seed, draw.randrange(9000))
    choice = named(policy).choose(asked, candidates)
    assert candidates.get(choice.name)
    assert 0 <= choice.predicted_tokens < max(tokens, 1)
    scores = named(policy).scores(asked, candidates)
    assert sorted(score.name for score in scores) == sorted(candidates.loads)
    assert all(score.total >= 0 and score.prefill_s >= 0 for score in scores)


@pytest.mark.parametrize("policy", ALL)
def test_excluded_replicas_are_never_chosen(policy: str) -> None:
    candidates = fleet(4)
    rest = candidates.without({"p1", "p3"})
    for number in range(100):
        asked = query(on(8000, 1, 3), key=KEY * number % 2**64, draw=number / 100, turn=number, session=number * KEY % 2**64)
        choice = named(policy).choose(asked, rest)
        assert choice.name in {"p0", "p2"}
        assert choice.predicted_tokens == 0
    assert len(candidates) == 4


# -- prefix: warm


def test_the_deepest_holder_wins(prefix: Policy) -> None:
    choice = prefix.choose(query(on(4000, 0, 1), on(8000, 1)), fleet())
    assert (choice.name, choice.reason, choice.predicted_tokens) == ("p1", Reason.WARM, 8000)


def test_a_hit_on_the_device_beats_the_same_hit_on_a_disk(prefix: Policy) -> None:
    level = Level(8000, device=1 << 3, host=1 << 3, held=1 << 3 | 1)
    assert prefix.choose(query(level), fleet()).name == "p1"
    elsewhere = Level(8000, device=0, host=0, held=1)
    assert prefix.choose(query(elsewhere), fleet()).name == "p0", "but a disk beats nothing"


def test_loading_is_not_dearer_than_computing(prefix: Policy) -> None:
    candidates = fleet(2)
    candidates.set_costs("p0", structs.replace(MEASURED, host_s_per_token=1.0))
    level = Level(8000, device=0, host=1, held=1)
    slow, none = sorted(prefix.scores(query(level), candidates), key=lambda score: score.name)
    assert slow.total <= none.total * 1.05
    assert (slow.held_tokens, slow.cached_tokens, slow.load_s) == (8000, 0, 0)


@pytest.mark.parametrize("policy", ALL)
def test_what_would_be_dearer_to_load_is_not_expected_to_be_cached(policy: str) -> None:
    candidates = fleet(1)
    levels = (Level(2000, 1, 1, 1), Level(5000, 0, 1, 1), Level(8000, 0, 0, 1))
    for disk_s, host_s, expected in ((1e-6, 1e-6, 8000), (1.0, 1e-6, 5000), (1.0, 1.0, 2000)):
        costs = structs.replace(MEASURED, host_s_per_token=host_s, disk_s_per_token=disk_s)
        candidates.set_costs("p0", costs)
        assert named(policy).choose(query(*levels), candidates).predicted_tokens == expected
        (score,) = named(policy).scores(query(*levels), candidates)
        assert (score.device_tokens, score.host_tokens, score.disk_tokens) == (2000, 3000, 3000)
        assert (score.held_tokens, score.cached_tokens) == (8000, expected)


def test_what_is_quickly_loaded_beats_what_is_slowly_loaded(prefix: Policy) -> None:
    candidates = fleet(2)
    candidates.set_costs("p0", structs.replace(MEASURED, host_s_per_token=1e-6, disk_s_per_token=9e-5))
    level = Level(8000, device=0, host=2, held=0b1001)
    deep = Level(8000, device=0, host=1 << 3, held=1 | 1 << 3)
    assert level.held == deep.held
    assert prefix.choose(query(deep), candidates).name == "p1", "from host memory, not from a slow disk"


def test_a_holder_with_a_long_queue_loses_to_an_idle_replica(prefix: Policy) -> None:
    candidates = fleet()
    candidates.update("p1", inflight=2, pending_tokens=60_000)
    choice = prefix.choose(query(on(8000, 1)), candidates)
    assert choice.name != "p1"
    assert choice.reason is Reason.OVERFLOW


def test_a_short_queue_is_waited_for(prefix: Policy) -> None:
    candidates = fleet()
    candidates.update("p1", inflight=1, pending_tokens=1000)
    assert prefix.choose(query(on(8000, 1)), candidates).name == "p1"


@given(st.lists(st.integers(0, 60), min_size=2, max_size=40), st.integers(0, 2**32))
def test_25_nobody_above_its_bound_is_chosen(loads: list[int], seed: int) -> None:
    candidates, draw = fleet(len(loads)), random.Random(seed)
    for i, load in enumerate(loads):
        candidates.update(f"p{i}", inflight=load)
    asked = query(on(9000, *draw.sample(range(len(loads)), draw.randrange(1, len(loads) + 1))), draw=draw.random())
    choice = named("prefix").choose(asked, candidates)
    assert candidates.loads[choice.name] + 1 <= Limits.of(candidates).hard
    cold = named("prefix").choose(query(), candidates)
    assert candidates.loads[cold.name] + 1 <= bound(sum(loads), len(loads))


def test_near_ties_are_broken_by_the_draw_so_that_routers_do_not_herd(prefix: Policy) -> None:
    candidates = fleet(4)
    chosen = Counter(prefix.choose(query(on(9000, 0, 1, 2, 3), draw=i / 1001), candidates).name for i in range(1000))
    assert len(chosen) == 4
    assert min(chosen.values()) > 150


def test_predictions_of_a_replica_that_drifts_count_less(prefix: Policy) -> None:
    candidates = fleet()
    candidates.update("p1", trust=0.3)
    choice = prefix.choose(query(on(7000, 0, 1), on(8000, 1)), candidates)
    assert (choice.name, choice.predicted_tokens) == ("p0", 7000)
    candidates.update("p0", trust=0.0)
    assert prefix.choose(query(on(8000, 1)), candidates).predicted_tokens == 2400


def test_a_depth_beyond_the_prompt_is_cut_to_all_but_its_last_token(prefix: Policy) -> None:
    # An engine's depth can exceed the router's estimate of the prompt: prices went negative (prefix_index.md).
    choice = prefix.choose(query(on(5000, 1), tokens=1000), fleet())
    assert (choice.name, choice.predicted_tokens) == ("p1", 999)
    assert all(score.total > 0 for score in prefix.scores(query(on(5000, 1), tokens=1000), fleet()))


def test_a_full_cache_is_spared_when_all_else_is_equal(prefix: Policy) -> None:
    candidates = fleet(2)
    candidates.update("p0", free_tokens=0)
    candidates.update("p1", free_tokens=100_000)
    assert {prefix.choose(query(on(3000, 0, 1), draw=i / 10), candidates).name for i in range(10)} == {"p1"}


def test_a_busy_pool_values_hits_more(prefix: Policy) -> None:
    # One holder with a queue 0.9 s longer than the others': worth it only if computing would lengthen everybody's queue.
    chosen = []
    for queued in (0, 20_000):
        candidates = fleet()
        for name, extra in (("p0", 9000), ("p1", 0), ("p2", 0)):
            candidates.update(name, inflight=2, pending_tokens=queued + extra)
        chosen.append(prefix.choose(query(on(2500, 0), tokens=3000), candidates).name)
    assert chosen[0] != "p0"
    assert chosen[1] == "p0"


def test_a_slower_replica_is_chosen_less(prefix: Policy) -> None:
    candidates = fleet(2)
    candidates.set_costs("p0", MEASURED)
    candidates.set_costs("p1", Costs(prefill_s_per_token=5e-4, decode_step_s=0.05, output_tokens=100.0))
    assert prefix.choose(query(on(1000, 0, 1)), candidates).name == "p0"


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_unmeasured_replicas_are_taken_for_average_ones(prefix: Policy, scale: float) -> None:
    candidates = fleet(4)
    candidates.set_costs("p0", Costs(prefill_s_per_token=scale * 1e-4))
    scores = {score.name: score for score in prefix.scores(query(on(8000, 2)), candidates)}
    assert scores["p1"].total == pytest.approx(scores["p0"].total)
    assert prefix.choose(query(on(8000, 2)), candidates).name == "p2"


@pytest.mark.parametrize("members", [20, 64, 256])
def test_large_fleets_find_a_holder_that_is_not_among_the_lightest(prefix: Policy, members: int) -> None:
    candidates = fleet(members)
    for i in range(members):
        candidates.update(f"p{i}", inflight=2 + (i == 7))
    assert prefix.choose(query(on(1000, *range(members)), on(9000, 7)), candidates).name == "p7"
    many = range(0, members, 1 + members // 20)
    choice = prefix.choose(query(on(9000, *many)), candidates)
    assert choice.predicted_tokens == 9000


def test_new_text_behind_a_shared_head_goes_home_unless_the_head_is_most_of_it(prefix: Policy) -> None:
    candidates = fleet(8)
    home = owners(candidates)[0]
    head_elsewhere = next(i for i in range(8) if f"p{i}" != home)
    asked = query(on(2000, head_elsewhere), tokens=4000)._replace(cold_tokens=2500)
    assert prefix.choose(asked, candidates).name == home
    asked = query(on(20_000, head_elsewhere), tokens=21_000)._replace(cold_tokens=20_500)
    assert prefix.choose(asked, candidates).name == f"p{head_elsewhere}"


# -- prefix: cold


def test_16_without_any_hit_the_ring_and_the_load_decide(prefix: Policy) -> None:
    candidates = fleet()
    first, second, third = owners(candidates)
    choice = prefix.choose(query(), candidates)
    assert (choice.name, choice.reason, choice.predicted_tokens) == (first, Reason.COLD, 0)
    candidates.update(first, inflight=9)
    assert prefix.choose(query(), candidates)[:2] == (second, Reason.COLD_MOVED)
    candidates.update(second, inflight=9)
    assert prefix.choose(query(), candidates)[:2] == (third, Reason.COLD_MOVED)


def test_16_a_hit_on_a_replica_that_is_no_candidate_is_no_hit(prefix: Policy) -> None:
    candidates = fleet()
    gone = query(on(8000, 17))
    assert prefix.choose(gone, candidates).name == owners(candidates)[0]
    assert prefix.choose(gone, candidates).predicted_tokens == 0


def test_a_cold_prompt_does_not_wait_behind_a_long_one_while_others_idle(prefix: Policy) -> None:
    candidates = fleet()
    first, second, _ = owners(candidates)
    candidates.update(first, inflight=1, pending_tokens=200_000)
    assert prefix.choose(query(tokens=500), candidates)[:2] == (second, Reason.COLD_MOVED)


def test_a_request_without_a_chain_goes_by_load(prefix: Policy) -> None:
    candidates = fleet(p0=2, p1=1, p2=3)
    assert prefix.choose(query(key=0), candidates)[:2] == ("p1", Reason.NO_CHAIN)
    assert named("chwbl").choose(query(key=0), candidates)[:2] == ("p1", Reason.NO_CHAIN)


def test_a_single_replica_is_the_only_choice(prefix: Policy) -> None:
    candidates = fleet(1, p0=500)
    assert prefix.choose(query(on(8000, 0)), candidates) == ("p0", Reason.ONLY, 8000)


# -- the others


def test_chwbl_looks_at_the_key_and_the_bound_alone() -> None:
    candidates = fleet()
    first, second, _ = owners(candidates)
    policy = named("chwbl")
    assert policy.choose(query(on(8000, int(second[1]))), candidates)[:2] == (first, Reason.COLD)
    candidates.update(first, inflight=7)
    assert policy.choose(query(), candidates)[:2] == (second, Reason.COLD_MOVED)
    assert [score.gated for score in policy.scores(query(), candidates) if score.name == first] == [True]


def test_session_follows_the_session_and_without_one_the_prompt() -> None:
    candidates, policy, other = fleet(16), named("session"), KEY ^ (1 << 63)
    first, second, *_ = owners(candidates, other)
    assert policy.choose(query(session=other), candidates)[:2] == (first, Reason.SESSION)
    assert policy.choose(query(), candidates)[:2] == (owners(candidates)[0], Reason.COLD)
    candidates.update(first, inflight=7)
    assert policy.choose(query(session=other), candidates)[:2] == (second, Reason.SESSION)


def test_least_load_counts_requests_then_queued_tokens() -> None:
    candidates, policy = fleet(3, p0=2, p1=1, p2=1), named("least_load")
    candidates.update("p1", pending_tokens=10)
    choice = policy.choose(query(on(9000, 0)), candidates)
    assert (choice.name, choice.reason, choice.predicted_tokens) == ("p2", Reason.LEAST_LOAD, 0)
    candidates.update("p1", pending_tokens=0)
    assert {policy.choose(query(draw=i / 8), candidates).name for i in range(8)} == {"p1", "p2"}


def test_round_robin_takes_turns_whatever_the_load() -> None:
    candidates, policy = fleet(3, p0=9), named("round_robin")
    assert [policy.choose(query(turn=i), candidates).name for i in range(6)] == ["p0", "p1", "p2"] * 2


def test_random_is_uniform_in_the_draw() -> None:
    candidates, policy = fleet(4, p0=9), named("random")
    assert Counter(policy.choose(query(draw=i / 100), candidates).name for i in range(100)) == dict.fromkeys(
        candidates.loads, 25
    )


# -- candidates


def test_sums_follow_updates_additions_and_removals() -> None:
    candidates = fleet(3, p0=4, p1=1)
    candidates.update("p2", pending_tokens=5000)
    assert candidates.mean_inflight == pytest.approx(5 / 3)
    assert candidates.mean_wait_s > 0
    candidates.remove("p2")
    candidates.remove("unknown")
    assert candidates.mean_wait_s == 0
    assert candidates.mean_inflight == 2.5
    candidates.add(Candidate("p9", bit=1 << 27))
    assert candidates.mask == 1 | 1 << 3 | 1 << 27
    candidates.set_place("p9", bit=1 << 30, device_tokens=5)
    assert candidates.mask == 1 | 1 << 3 | 1 << 30
    assert sorted(candidates.ring.names) == ["p0", "p1", "p9"]
    with pytest.raises(KeyError):
        candidates.update("p2", inflight=1)


def test_the_lightest_come_first() -> None:
    candidates = fleet(4, p0=3, p2=1)
    candidates.update("p3", inflight=1, pending_tokens=50_000)
    assert [member.name for member in candidates] == ["p1", "p2", "p0", "p3"]
    candidates.update("p1", inflight=9)
    assert [member.name for member in candidates] == ["p2", "p0", "p1", "p3"]


def test_29_newcomers_are_those_that_join_or_lose_their_cache_later() -> None:
    candidates = fleet(3)
    assert not candidates.newcomers, "a pool that starts as a whole has none"
    for name in candidates.loads:
        candidates.update(name, resident=1000)
    candidates.add(Candidate("new", bit=1 << 9))
    candidates.update("p1", resident=0)
    assert {member.name for member in candidates.newcomers} == {"new", "p1"}
    assert {member.name for member in candidates.without({"p0", "p2"}).newcomers} == {"new", "p1"}
    candidates.update("new", resident=800)
    assert {member.name for member in candidates.newcomers} == {"p1"}
    candidates.set_place("p1", bit=1 << 12, device_tokens=100)
    candidates.update("p1", free_tokens=0, resident=1)
    assert not candidates.newcomers, "a cache that is full is not new, however little it holds"


def test_a_replica_whose_cache_is_not_known_is_no_newcomer() -> None:
    candidates = fleet(2)
    for name in candidates.loads:
        candidates.update(name, resident=1000)
    assert not candidates.newcomers
    candidates.add(Candidate("backend"))
    assert not candidates.newcomers


def test_29_a_newcomer_is_given_a_share_of_hits_and_the_reason_says_so(prefix: Policy) -> None:
    candidates = fleet(3)
    assert not candidates.newcomers
    for name in candidates.loads:
        candidates.update(name, resident=1000)
    candidates.update("p2", resident=0)
    choices = [prefix.choose(query(on(8000, 0), draw=i / 1000), candidates) for i in range(1000)]
    chosen = Counter(choice.name for choice in choices)
    assert 0.5 / 3 < chosen["p2"] / 1000 < 1 / 3
    assert {choice.reason for choice in choices if choice.name == "p2"} == {Reason.FRESH}
    candidates.update("p2", inflight=1)
    assert prefix.choose(query(on(8000, 0), draw=0.01), candidates).name == "p0", "not above the mean load"
