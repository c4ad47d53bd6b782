"""Dispatch: bookings and promises that begin at once and end exactly once; retries; the closed loop. No I/O."""

from __future__ import annotations

import random
from array import array
from bisect import bisect_right
from collections import Counter
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from prefixpool import wire
from prefixpool.chain import canonical, prefix_chain
from prefixpool.errors import RequestError
from prefixpool.policy.base import Reason
from prefixpool.wire import Mode, State, Tier
from prefixpool_router.attempt import FleetDispatch
from prefixpool_router.dispatch import FleetDispatcher
from prefixpool_router.dispatch_types import Outcome, RoutedRequest
from prefixpool_router.explain import DecisionRing, Explanation
from prefixpool_router.fleet import Fleet, FleetSettings
from prefixpool_router.knowledge import CONFIRM_S, Knowledge
from prefixpool_router.load import TOLD_AFTER_S
from prefixpool_router.membership import Member
from prefixpool_router.metrics import RoutingMetrics
from prefixpool_router.replica import Replica
from prefixpool_router.state import replica_report

PATH = "/v1/chat/completions"
BLOCK = 16


class Pool:
    """A fleet of replicas that are ready, with a dispatcher; the clock is the test's."""

    def __init__(self, *names: str, agents: bool = True, policy: str = "prefix") -> None:
        self.now = 100.0
        self.registry = CollectorRegistry()
        metrics = RoutingMetrics(self.registry)
        self.fleet = Fleet(Knowledge(64 << 20), metrics, FleetSettings(), lambda: self.now)
        self.draw = random.Random(1)
        self.decisions = DecisionRing(64)
        self.dispatcher = FleetDispatcher(
            self.fleet, metrics, self.decisions, policy=policy, draw=self.draw.random, wall=lambda: self.now
        )
        self.fleet.apply([Member(name=n, engine=f"http://{n}:1", agent=f"http://{n}:2" if agents else None) for n in names])
        for replica in self.fleet.replicas.values():
            if agents:
                self.greet(replica)
            else:
                replica.came_up()

    def greet(self, replica: Replica, epoch: int = 1) -> None:
        replica.welcomed(wire.Welcome(replica=replica.name, epoch=epoch, block_tokens=BLOCK, device_tokens=50_000))
        replica.status_changed(wire.Status(state=State.READY, epoch=epoch))
        replica.snapshot_begins(wire.SnapshotBegin(epoch=epoch))
        replica.snapshot_ended(wire.SnapshotEnd(epoch=epoch))

    def __getitem__(self, name: str) -> Replica:
        return self.fleet.replicas[name]

    def send(self, request: RoutedRequest, *exclude: str) -> FleetDispatch:
        return self.dispatcher.dispatch(request, frozenset(exclude))

    def holds(self, name: str, request: RoutedRequest, *, tokens: int, ends: tuple[int, ...] = ()) -> None:
        """The agent publishes the whole prompt of a request as resident. `ends`: where device and host end, in tokens."""
        chain = prefix_chain(content) if (content := canonical(PATH, request.body or {})) else None
        assert chain is not None
        depths = array("I", [offset * tokens // chain.total_bytes for offset in chain.offsets])
        start = 0
        for tier, upto in zip((Tier.DEVICE, Tier.HOST, Tier.DISK), (*ends, tokens), strict=False):
            end = bisect_right(depths, upto)
            self[name].published(tier, chain.hashes[start:end], depths[start:end])
            start = end

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.fleet.tick(0.0)

    @property
    def inflight(self) -> dict[str, int]:
        return {name: replica.candidate.inflight for name, replica in self.fleet.replicas.items()}

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"prefixpool_router_{name}", labels) or 0.0


def chat(*texts: str, **fields: Any) -> RoutedRequest:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return RoutedRequest(path=PATH, body={"model": "m", "messages": messages, **fields}, request_id="r")


def ok(prompt: int, cached: int | None) -> Outcome:
    return Outcome(status=200, prompt_tokens=prompt, cached_tokens=cached, output_tokens=5)


LONG = "word " * 1600  # 8,000 bytes


@pytest.mark.parametrize(("stream", "reason", "stays"), [(False, Reason.WARM, True), (True, Reason.OVERFLOW, False)])
def test_answers_that_were_decoded_all_at_once_drove_requests_from_their_prefix(
    stream: bool, reason: Reason, stays: bool
) -> None:
    """Not streamed, long ago sent: their agent says that no prompt waits any more. Streams say that themselves."""
    pool = Pool("a", "b", "c")
    asked = chat(LONG * 2)
    for name in ("a", "b", "c"):
        pool[name].costs_measured(wire.Costs(prefill_s_per_token=0.001, decode_step_s=0.01, output_tokens=100, samples=50))
    pool.holds("a", asked, tokens=4000)
    for i in range(3):
        pool.send(chat(f"{i} " + LONG * 4, stream=stream), "b", "c")
    pool.now += TOLD_AFTER_S
    pool["a"].load_reported(wire.Load(inflight=3, prefill_backlog_tokens=0))
    sent = pool.send(asked)
    assert (sent.replica == "a", sent.reason) == (stays, reason)


# -- load and promises count at once


def test_a_dispatch_counts_at_once_as_load_and_residency() -> None:
    pool = Pool("a", "b", "c")
    first = pool.send(chat(LONG))
    assert first.reason == Reason.COLD
    assert first.predicted_tokens == 0
    assert pool.inflight[first.replica] == 1
    assert pool[first.replica].candidate.pending_tokens > 1500
    second = pool.send(chat(LONG))
    assert (second.replica, second.reason) == (first.replica, Reason.WARM)
    assert second.predicted_tokens % BLOCK == 0
    assert second.predicted_tokens > 1900


@pytest.mark.parametrize("agents", [True, False], ids=["agents", "no agents"])
def test_a_prompt_whose_tokens_were_counted_was_believed_to_be_cached_there(agents: bool) -> None:
    """Clients count before they ask. An engine tokenises then, and computes nothing."""
    pool, body = Pool("a", "b", "c", agents=agents), {"model": "m", "messages": [{"role": "user", "content": LONG}]}
    counting = pool.send(RoutedRequest(path="/v1/messages/count_tokens", body=body, body_bytes=LONG.encode()))
    assert (counting.predicted_tokens, pool[counting.replica].candidate.pending_tokens) == (0, 1)
    asking = pool.send(RoutedRequest(path="/v1/messages", body=body))
    assert (asking.reason, asking.predicted_tokens) == (Reason.COLD, 0)
    asking.abandon("busy", replica_down=False)
    counting.finish(Outcome(status=200))
    assert pool.send(RoutedRequest(path="/v1/messages", body=body)).predicted_tokens == 0


def test_an_abandoned_dispatch_leaves_nothing() -> None:
    pool = Pool("a", "b", "c")
    first = pool.send(chat(LONG))
    first.abandon("busy", replica_down=False)
    first.abandon("busy", replica_down=False)
    first.finish(ok(2000, 0))
    assert set(pool.inflight.values()) == {0}
    assert len(pool.fleet.knowledge.predicted) == 0
    assert pool.send(chat(LONG)).predicted_tokens == 0


def test_one_failing_request_does_not_take_away_what_another_promises() -> None:
    pool = Pool("a")
    first, second = pool.send(chat(LONG)), pool.send(chat(LONG))
    second.finish(Outcome(status=500, error="engine failed"))
    assert pool.send(chat(LONG)).predicted_tokens > 1900
    first.finish(Outcome(status=400))
    assert pool[first.replica].load.own == 1


def test_after_1000_random_endings_all_counts_are_zero() -> None:
    pool, draw = Pool("a", "b", "c"), random.Random(7)
    running: list[FleetDispatch] = []
    for i in range(1000):
        running.append(pool.send(chat(f"{i % 50} {LONG[: draw.randrange(2000)]}")))
        while len(running) > draw.randrange(20):
            end_somehow(running.pop(draw.randrange(len(running))), draw)
        pool.later(0.01)
        for replica in pool.fleet.replicas.values():
            assert replica.load.own >= 0
            assert replica.candidate.pending_tokens >= 0
    for dispatch in running:
        dispatch.finish(Outcome(status=499, aborted=True))
    pool.later(CONFIRM_S + 1)
    assert set(pool.inflight.values()) == {0}
    assert {replica.candidate.pending_tokens for replica in pool.fleet.replicas.values()} == {0}
    assert len(pool.fleet.knowledge.predicted) == 0


def end_somehow(dispatch: FleetDispatch, draw: random.Random) -> None:
    if draw.random() < 0.5:
        dispatch.first_byte()
    endings = [
        lambda: dispatch.finish(ok(500, 0)),
        lambda: dispatch.finish(Outcome(status=499, aborted=True)),
        lambda: dispatch.finish(Outcome(status=200, error="client went away", aborted=True)),
        lambda: dispatch.abandon("busy", replica_down=False),
        lambda: dispatch.finish(Outcome(status=400)),
    ]
    for _ in range(draw.randrange(1, 3)):
        draw.choice(endings)()


def test_during_a_stream_the_count_stays() -> None:
    pool = Pool("a")
    dispatch = pool.send(chat(LONG))
    dispatch.first_byte()
    dispatch.first_byte()
    assert pool.inflight == {"a": 1}
    assert pool["a"].candidate.pending_tokens == 0
    dispatch.finish(ok(2000, 0))
    assert pool.inflight == {"a": 0}


def test_facts_outlive_the_promise_and_promises_do_not_outlive_the_facts() -> None:
    pool = Pool("a")
    request = chat(LONG)
    dispatch = pool.send(request)
    pool.holds("a", request, tokens=1800)
    dispatch.finish(ok(1800, 0))
    pool.later(CONFIRM_S + 0.1)
    assert pool.send(request).predicted_tokens == 1799 // BLOCK * BLOCK


def test_what_no_agent_confirms_is_not_believed_for_long() -> None:
    pool = Pool("a")
    pool.send(chat(LONG)).finish(ok(1800, 0))
    assert pool.send(chat(LONG)).predicted_tokens > 0
    pool.later(CONFIRM_S + 0.1)
    pool.send(chat("something else"))
    facts = pool["a"].pictures.facts
    assert facts is not None
    assert facts.promised < 200


def test_without_agents_history_is_remembered_at_true_depth() -> None:
    pool = Pool("a", "b", agents=False)
    first = pool.send(chat(LONG))
    first.finish(ok(1700, 0))
    second = pool.send(chat(LONG, "answer", "more"))
    assert second.replica == first.replica
    assert 1680 <= second.predicted_tokens <= 1700
    second.finish(ok(1720, 1696))
    pool.later(301)
    assert pool.send(chat(LONG)).predicted_tokens == 0


def test_a_request_that_ends_after_its_replica_left_changes_nothing() -> None:
    pool = Pool("a", "b")
    dispatch = pool.send(chat(LONG))
    pool.fleet.apply([r.member for name, r in pool.fleet.replicas.items() if name != dispatch.replica])
    dispatch.first_byte()
    dispatch.finish(ok(2000, 0))
    assert dispatch.replica not in pool.fleet.replicas
    assert len(pool.fleet.candidates) == 1
    assert len(pool.fleet.knowledge.predicted) == 0


@pytest.mark.parametrize("how", ["finished", "abandoned"])
def test_series_of_a_replica_that_left_came_back_with_the_end_of_its_last_request(how: str) -> None:
    """And stayed for ever, one set for each name that an autoscaled pool ever had."""
    pool = Pool("a", "b")
    dispatch = pool.send(chat(LONG))
    pool.fleet.apply([r.member for name, r in pool.fleet.replicas.items() if name != dispatch.replica])
    if how == "finished":
        dispatch.finish(ok(2000, 0))
    else:
        dispatch.abandon("refused", replica_down=True)
    pool.fleet.measure()
    told = {sample.labels.get("replica") for family in pool.registry.collect() for sample in family.samples}
    assert told == {None, *pool.fleet.replicas}


def test_the_end_of_a_request_counts_for_a_replica_of_the_same_name() -> None:
    pool = Pool("a")
    dispatch = pool.send(chat(LONG))
    pool.fleet.apply([Member(name="a", engine="http://elsewhere:1", agent="http://a:2")])
    dispatch.finish(ok(2000, 0))
    assert pool.metric("prompt_tokens_total", replica="a") == 2000


def test_without_agents_too() -> None:
    """Ending as history must not bring back a replica that left."""
    pool = Pool("a", "b", agents=False)
    dispatch = pool.send(chat(LONG))
    pool.fleet.apply([r.member for name, r in pool.fleet.replicas.items() if name != dispatch.replica])
    dispatch.finish(ok(2000, 0))
    assert len(pool.fleet.knowledge.predicted) == 0


def test_a_request_that_outlives_its_agent_becomes_history() -> None:
    pool = Pool("a")
    dispatch = pool.send(chat(LONG))
    pool["a"].lost("agent silent")
    dispatch.finish(ok(1700, 0))
    pool.later(CONFIRM_S + 0.1)
    assert 1680 <= pool.send(chat(LONG, "answer", "more")).predicted_tokens <= 1700


def test_a_request_that_ends_after_an_engine_restart_changes_nothing() -> None:
    pool = Pool("a")
    dispatch = pool.send(chat(LONG))
    pool.greet(pool["a"], epoch=2)
    dispatch.finish(ok(2000, 0))
    assert pool.send(chat(LONG)).predicted_tokens == 0


# -- retries


def test_a_retry_releases_first_and_goes_elsewhere() -> None:
    pool = Pool("a", "b", "c")
    first = pool.send(chat(LONG))
    first.abandon("busy", replica_down=False)
    assert set(pool.inflight.values()) == {0}
    second = pool.send(chat(LONG), first.replica)
    assert second.replica != first.replica
    assert pool[first.replica].candidate.inflight == 0


def test_refused_connections_exclude_the_replica_for_everybody() -> None:
    pool = Pool("a", "b", "c", agents=False)
    request = chat(LONG)
    first = pool.send(request)
    first.abandon("refused", replica_down=True)
    for i in range(20):
        assert pool.send(chat(f"{i} {LONG}")).replica != first.replica
    pool[first.replica].came_up()
    back = pool.fleet.candidates.get(first.replica)
    assert back is not None
    assert pool[first.replica].pictures.history is None or pool[first.replica].pictures.history.promised == 0


def test_when_all_refuse_the_client_gets_503_with_retry_after() -> None:
    pool = Pool("a", "b")
    with pytest.raises(RequestError) as caught:
        pool.send(chat(LONG), "a", "b")
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1)
    assert pool.metric("refusals_total", cause="no_replica") == 1


def test_a_fence_met_on_the_way_takes_the_replica_out() -> None:
    pool = Pool("a", "b", agents=False)
    first = pool.send(chat(LONG))
    first.abandon("fenced", replica_down=False)
    assert all(pool.send(chat(f"{i}")).replica != first.replica for i in range(10))


# -- load decides where it must


def test_a_miss_with_a_saturated_place_goes_to_an_idle_one() -> None:
    pool = Pool("a", "b")
    busy = pool.send(chat(LONG)).replica
    pool[busy].load_reported(wire.Load(inflight=60, prefill_backlog_tokens=100_000))
    places = {pool.send(chat(f"other {i} {LONG}")).replica for i in range(8)}
    assert busy not in places


def test_without_any_hit_load_decides() -> None:
    pool = Pool("a", "b", policy="prefix")
    pool["a"].load_reported(wire.Load(inflight=50))
    request = RoutedRequest(path="/v1/embeddings", body={"model": "m", "input": "x"}, body_bytes=b"x" * 50)
    dispatch = pool.send(request)
    assert (dispatch.replica, dispatch.reason) == ("b", Reason.NO_CHAIN)


def test_100_identical_requests_in_one_tick_do_not_all_land_on_one_replica() -> None:
    pool = Pool("a", "b", "c", "d")
    sent = Counter(pool.send(chat(LONG)).replica for _ in range(100))
    assert len(sent) >= 3
    assert max(sent.values()) <= 1.25 * 25 + 10  # the policy's bound


def test_no_replica_exceeds_its_bound_while_another_is_below_the_mean() -> None:
    pool = Pool("a", "b", "c")
    for i in range(200):
        pool.send(chat(f"hot {LONG}" if i % 10 else f"{i} {LONG}"))
    mean = 200 / 3
    assert max(pool.inflight.values()) <= 1.25 * mean + 16


# -- requests


def test_unread_bodies_are_routed_by_load() -> None:
    pool = Pool("a", "b")
    dispatch = pool.send(RoutedRequest(path="/v1/audio/transcriptions"))
    assert dispatch.predicted_tokens == 0
    dispatch.finish(Outcome(status=200))
    assert set(pool.inflight.values()) == {0}


def test_an_unknown_policy_is_the_clients_error() -> None:
    pool = Pool("a")
    with pytest.raises(RequestError) as caught:
        pool.send(RoutedRequest(path=PATH, body={}, policy="psychic"))
    assert (caught.value.status, caught.value.code) == (400, "unknown_policy")


@pytest.mark.parametrize("session", [b"\xe9\xff", b"\xed\xa0\x80", "\U0001f600".encode(), b"a\0b"])
def test_a_session_header_that_is_not_utf8_killed_the_router(session: bytes) -> None:
    pool = Pool("a", "b", "c", policy="session")
    request = RoutedRequest(path=PATH, body=chat(LONG).body, session=session.decode("utf-8", "surrogateescape"))
    assert len({pool.send(request).replica for _ in range(3)}) == 1


@pytest.mark.parametrize("policy", ["prefix", "chwbl", "least_load", "round_robin", "random", "session"])
def test_every_policy_can_be_asked_for(policy: str) -> None:
    pool = Pool("a", "b", "c")
    request = RoutedRequest(path=PATH, body=chat(LONG).body, policy=policy, session="s")
    dispatch = pool.send(request)
    assert dispatch.replica in "abc"
    assert told(pool)[0].policy == policy


def test_decisions_that_are_kept_do_not_keep_what_clients_sent() -> None:
    pool = Pool("a", agents=False)
    pool.send(chat(LONG, model="m" * 1_000_000)).finish(Outcome(status=404))
    (kept,) = pool.decisions.latest(1)
    assert kept.model == "m" * 256
    assert LONG not in str([getattr(kept, name) for name in kept.__slots__])


def test_scopes_do_not_share_predictions() -> None:
    pool = Pool("a")
    pool.send(RoutedRequest(path=PATH, body=chat(LONG).body, scope_salt="one"))
    assert pool.send(RoutedRequest(path=PATH, body=chat(LONG).body, scope_salt="two")).predicted_tokens == 0
    assert pool.send(RoutedRequest(path=PATH, body=chat(LONG).body, scope_salt="one")).predicted_tokens > 0


# -- closed loop


def test_predictions_are_compared_with_what_was_cached() -> None:
    pool = Pool("a")
    request = chat(LONG)
    pool.holds("a", request, tokens=1808)
    pool.send(request).finish(ok(1808, 1760))
    assert pool.metric("predicted_cached_tokens_total", replica="a", tier="device") == 1792
    assert pool.metric("cached_tokens_total", replica="a") == 1760
    assert pool.metric("prompt_tokens_total", replica="a") == 1808
    assert pool.metric("prediction_error_tokens_sum", replica="a", direction="over") == 32


def test_a_wholly_cached_prompt_still_computes_its_last_block() -> None:
    """vLLM computes the last token of every prompt, so of n cached tokens at most n - 1 count, in whole blocks."""
    pool = Pool("a")
    for tokens, predicted in ((1808, 1792), (1809, 1808), (1807, 1792)):
        request = chat(f"{tokens} {LONG}")
        pool.holds("a", request, tokens=tokens)
        dispatch = pool.send(request)
        assert dispatch.predicted_tokens == predicted
        dispatch.abandon("busy", replica_down=False)


@pytest.mark.parametrize("fields", [{"n": 2}, {"prompt_logprobs": 1}])
def test_answers_that_tell_nothing_do_not_count(fields: dict[str, int]) -> None:
    pool = Pool("a")
    request = chat(LONG, **fields)
    for _ in range(30):
        pool.holds("a", request, tokens=1808)
        pool.send(request).finish(ok(1808, 0))
    assert pool["a"].mode is Mode.PRECISE
    assert pool.metric("cached_tokens_total", replica="a") == 0


def test_a_drifting_replica_is_routed_by_history_until_it_heals() -> None:
    pool = Pool("a", "b")
    request = chat(LONG)
    pool.holds("a", request, tokens=1808)
    for _ in range(30):
        dispatch = pool.send(request)
        dispatch.finish(ok(1808, 0))
    assert pool["a"].mode is Mode.APPROXIMATE
    assert "drifted" in pool.fleet.verdict("a").mode_why
    for i in range(60):
        pool.holds("a", request, tokens=1808)
        attempt = pool.send(request, "b")
        attempt.finish(ok(1808, 1808 - BLOCK))
        if pool["a"].mode is Mode.PRECISE:
            break
        assert i < 50
    assert pool.fleet.verdict("a").mode is Mode.PRECISE


def test_predictions_that_rest_on_a_running_request_are_no_drift() -> None:
    """A burst on one cold document: the second finds nothing cached yet, through no fault of the agent's account."""
    pool = Pool("a")
    for i in range(40):
        running = pool.send(chat(f"{i} {LONG}"))
        pool.send(chat(f"{i} {LONG}")).finish(ok(1800, 0))
        running.finish(ok(1800, 0))
        pool.later(CONFIRM_S + 0.1)
    assert pool["a"].mode is Mode.PRECISE
    assert pool["a"].candidate.trust == 1.0


def test_trust_reaches_the_candidate_but_not_the_prediction() -> None:
    pool = Pool("a")
    request = chat(LONG)
    pool.holds("a", request, tokens=1808)
    for _ in range(5):
        pool.send(request).finish(ok(1808, 1000))
    assert 0.7 < pool["a"].candidate.trust < 0.95
    assert pool.send(request).predicted_tokens == 1792


def test_the_length_of_prompts_is_learned() -> None:
    pool = Pool("a")
    for i in range(5):
        pool.send(chat(f"{i} {LONG}")).finish(ok(4000, 0))
    pool.send(chat(f"new {LONG}"))
    assert told(pool)[0].prompt_tokens == pytest.approx(4000, rel=0.02)


# -- tiers: load or compute


def with_tiers(host_s: float, disk_s: float, *, draw: float = 0.3) -> tuple[Pool, RoutedRequest]:
    """One replica with a third of a prompt in each tier, where computing a token takes 0.1 ms."""
    pool, request = Pool("a"), chat(LONG)
    pool.dispatcher._draw = lambda: draw
    pool["a"].costs_measured(wire.Costs(prefill_s_per_token=1e-4, host_s_per_token=host_s, disk_s_per_token=disk_s))
    pool.holds("a", request, tokens=1808, ends=(600, 1200))
    return pool, request


@pytest.mark.parametrize(
    ("host_s", "disk_s", "told_params", "near", "refused"),
    [
        (1e-6, 2e-6, {}, 1792, ()),
        (1e-6, 1e-3, {"kv_load_tiers": [{"medium": "CPU"}]}, 1200, ("disk",)),
        (1e-3, 2e-3, {"max_load_tokens": 0}, 600, ("host", "disk")),
    ],
)
def test_an_engine_is_told_not_to_load_what_is_cheaper_to_compute(
    host_s: float, disk_s: float, told_params: dict[str, Any], near: int, refused: tuple[str, ...]
) -> None:
    pool, request = with_tiers(host_s, disk_s)
    dispatch = pool.send(request)
    assert dispatch.kv_transfer_params == told_params
    assert near - 100 <= dispatch.predicted_tokens <= near
    assert dispatch.predicted_tokens % BLOCK == 0
    (explained,) = told(pool)
    tiers = explained.tiers
    assert tiers.told == told_params
    assert tiers.device_tokens + tiers.host_tokens + tiers.disk_tokens == explained.predicted_tokens
    assert tiers.held_tokens == 1807
    assert tiers.recompute_s == pytest.approx(1e-4 * (1807 - tiers.device_tokens), rel=0.02)
    assert {tier: pool.metric("refused_loads_total", replica="a", tier=tier) for tier in ("host", "disk")} == {
        tier: float(tier in refused) for tier in ("host", "disk")
    }


def test_predicted_tokens_are_counted_by_tier() -> None:
    pool, request = with_tiers(1e-6, 2e-6)
    dispatch = pool.send(request)
    dispatch.finish(ok(1808, 1792))
    counted = [pool.metric("predicted_cached_tokens_total", replica="a", tier=tier) for tier in ("device", "host", "disk")]
    assert sum(counted) == dispatch.predicted_tokens == 1792
    assert min(counted) > 500
    assert replica_report(pool.fleet, pool["a"]).predicted_tokens == dict(
        zip(("device", "host", "disk"), counted, strict=True)
    )


def test_what_an_engine_did_not_load_as_told_is_no_drift() -> None:
    pool, request = with_tiers(1e-3, 2e-3)
    for _ in range(30):
        dispatch = pool.send(request)
        dispatch.finish(ok(1808, dispatch.predicted_tokens))
        pool.later(2 * CONFIRM_S)
    assert pool["a"].candidate.trust == 1.0
    assert pool["a"].mode is Mode.PRECISE


def test_a_refused_load_counts_as_work() -> None:
    (pool, request), (quick, same) = with_tiers(1e-3, 2e-3), with_tiers(1e-6, 2e-6)
    pool.send(request)
    quick.send(same)
    assert pool["a"].candidate.pending_tokens > quick["a"].candidate.pending_tokens + 1000


def test_a_tier_that_is_too_dear_is_tried_now_and_then() -> None:
    pool, request = with_tiers(1e-3, 2e-3, draw=0.0)
    dispatch = pool.send(request)
    assert (dispatch.kv_transfer_params, dispatch.predicted_tokens) == ({}, 1792)


def test_a_client_that_may_steer_loading_is_not_overruled() -> None:
    pool, request = with_tiers(1e-3, 2e-3)
    dispatch = pool.send(msgspec.structs.replace(request, steers_loading=True))
    assert (dispatch.kv_transfer_params, dispatch.predicted_tokens) == ({}, 1792)


def reserving(pool: Pool, *, host_bytes: int, **more: Any) -> FleetDispatch:
    """A request of a key that may reserve, to a replica with so much host memory."""
    welcome = wire.Welcome(replica="a", epoch=1, block_tokens=BLOCK, device_tokens=50_000, host_bytes=host_bytes)
    pool["a"].welcomed(welcome)
    return pool.send(msgspec.structs.replace(chat(LONG), tenant="red", reserve_s=90.0, **more))


def test_a_reserved_prompt_is_kept_in_host_memory() -> None:
    pool = Pool("a")
    dispatch = reserving(pool, host_bytes=1 << 30)
    (explained,) = told(pool)
    wish = {"tenant": "red", "pin_until": pool.now + 90.0, "pin_tokens": explained.prompt_tokens}
    assert dispatch.kv_transfer_params == explained.tiers.told == wish


def test_a_reservation_is_told_together_with_what_is_not_loaded() -> None:
    pool, request = with_tiers(1e-3, 2e-3)
    pool["a"].welcomed(wire.Welcome(replica="a", epoch=1, block_tokens=BLOCK, device_tokens=50_000, host_bytes=1))
    dispatch = pool.send(msgspec.structs.replace(request, tenant="red", reserve_s=90.0))
    assert dispatch.kv_transfer_params.keys() == {"max_load_tokens", "tenant", "pin_until", "pin_tokens"}


def test_where_nothing_can_be_kept_nothing_is_reserved() -> None:
    assert reserving(Pool("a"), host_bytes=0).kv_transfer_params == {}
    assert reserving(Pool("a"), host_bytes=1 << 30, steers_loading=True).kv_transfer_params == {}


def test_lists_of_models_and_uploads_of_keys_that_may_reserve_failed_because_nothing_can_be_added_to_their_bodies() -> None:
    pool = Pool("a")
    pool["a"].welcomed(wire.Welcome(replica="a", epoch=1, block_tokens=BLOCK, device_tokens=50_000, host_bytes=1 << 30))
    for path in ("/v1/models", "/v1/audio/transcriptions"):
        request = RoutedRequest(path=path, body=None, body_bytes=b"", tenant="red", reserve_s=90.0)
        assert pool.send(request).kv_transfer_params == {}


def test_an_engine_without_lower_tiers_is_told_nothing() -> None:
    pool, request = with_tiers(1e-3, 2e-3)
    pool.holds("a", request, tokens=1808)
    assert pool.send(request).kv_transfer_params == {}


# -- explain


def told(pool: Pool, count: int = 5, request_id: str = "") -> list[Explanation]:
    return [decision.explanation(0) for decision in pool.decisions.latest(count, request_id)]


def test_a_decision_is_explained_by_the_numbers_of_its_time() -> None:
    pool = Pool("a", "b")
    request = chat(LONG)
    pool.holds("a", request, tokens=1808)
    dispatch = pool.send(request)
    pool["a"].load_reported(wire.Load(inflight=99))
    dispatch.finish(ok(1808, 1792))
    (first,) = told(pool, request_id="r")
    assert (first.replica, first.reason, first.mode) == ("a", Reason.WARM, Mode.PRECISE)
    numbers = {candidate.name: candidate for candidate in first.candidates}
    assert (numbers["a"].held_tokens, numbers["a"].inflight) == (1807, 0)
    assert (numbers["b"].held_tokens, numbers["b"].inflight) == (0, 0)
    assert numbers["a"].total < numbers["b"].total
    assert first.outcome is not None
    assert (first.outcome.status, first.outcome.cached_tokens) == (200, 1792)


def test_a_retry_is_explained_as_two_attempts() -> None:
    pool = Pool("a", "b")
    first = pool.send(chat(LONG))
    first.abandon("busy", replica_down=False)
    pool.send(chat(LONG), first.replica)
    second_told, first_told = told(pool)
    assert first_told.outcome is not None
    assert first_told.outcome.abandoned == "busy"
    assert second_told.excluded == (first.replica,)
    assert second_told.outcome is None
    assert [candidate.name for candidate in second_told.candidates] == [second_told.replica]


def test_explanations_hold_no_prompt_text() -> None:
    pool = Pool("a")
    pool.send(chat("a very secret word")).finish(ok(10, 0))
    assert "secret" not in repr(told(pool))


def test_only_the_last_decisions_are_kept() -> None:
    pool = Pool("a")
    for i in range(100):
        pool.send(chat(f"{i}")).finish(ok(10, 0))
    assert len(pool.decisions) == 64
    assert int(told(pool)[0].id, 16) == 100
