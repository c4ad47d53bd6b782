"""What goes first: the least worth, children before parents, nothing that is promised."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from prefixpool_agent.tiers.reservations import Reservations, Wish
from prefixpool_agent.tiers.trail import Place, Trail
from prefixpool_agent.tiers.worth import Ranking, recompute


def key(i: int) -> bytes:
    return i.to_bytes(4, "big")


def ranking(chunks: int = 0, seconds: Callable[[int], float] = recompute) -> Ranking:
    """So many chunks without parents, one a second."""
    made = Ranking(1000, seconds)
    for i in range(chunks):
        made.add(key(i), b"", 32, float(i))
    return made


def chain(made: Ranking, *numbers: int, at: float = 0.0) -> None:
    for n, i in enumerate(numbers):
        made.add(key(i), key(numbers[n - 1]) if n else b"", 32 * (n + 1), at)


def test_with_nothing_learned_the_longest_unused_goes() -> None:
    made = ranking(5)
    made.use(key(0), 10.0)
    assert made.pop(2, 20.0) == [key(1), key(2)]


def test_children_go_before_parents() -> None:
    made = ranking()
    chain(made, 1, 2, 3)
    made.add(key(9), key(1), 64, 50.0)
    assert made.pop(3, 100.0) == [key(3), key(2), key(9)]
    assert made.pop(1, 100.0) == [key(1)]


def test_parent_that_comes_after_its_child_stays_as_long() -> None:
    made = ranking()
    made.add(key(2), key(1), 64, 10.0)
    made.add(key(1), b"", 32, 0.0)
    assert made.pop(1, 20.0) == [key(2)]


def test_busy_protected_and_promised_chunks_stay() -> None:
    made = ranking(4)
    made.set_busy(key(0), True)
    made.reserve(key(1), 100.0)
    assert made.pop(2, 50.0, {key(2)}) is None
    assert len(made) == 4, "all or nothing"
    assert made.pop(1, 50.0, {key(2)}) == [key(3)]
    made.set_busy(key(0), False)
    assert made.pop(2, 50.0) == [key(0), key(2)]
    assert made.pop(1, 101.0) == [key(1)]


def test_promise_is_prolonged_not_shortened() -> None:
    made = ranking(1)
    made.reserve(key(0), 100.0)
    made.reserve(key(0), 200.0)
    made.reserve(key(0), 50.0)
    assert made.pop(1, 150.0) is None
    assert made.pop(1, 250.0) == [key(0)]


def test_what_costs_more_to_compute_stays_longer() -> None:
    made = ranking(0, lambda tokens: 32.0 if tokens > 1000 else 1.0)
    made.add(key(1), b"", 2000, 0.0)
    made.add(key(2), b"", 32, 5.0)
    assert made.pop(1, 10.0) == [key(2)]


def test_chunk_asked_for_again_after_it_went_is_worth_more() -> None:
    made = ranking(3)
    assert made.pop(1, 3.0) == [key(0)]
    for i in range(1000, 1100):
        made.add(key(i), b"", 32, float(i))
    made.add(key(0), b"", 32, 1100.0)
    for i in range(1101, 1200):
        made.add(key(i), b"", 32, float(i))
        made.pop(1, float(i))
    assert key(0) in made


def test_a_cycle_somewhat_larger_than_the_pool_finds_much_of_itself() -> None:
    """Least recently used finds nothing at all."""
    made, hits, at = ranking(), 0, 0.0
    for _ in range(60):
        for i in range(120):
            at += 1
            if key(i) in made:
                hits += 1
                made.use(key(i), at)
                continue
            if len(made) >= 100:
                made.pop(1, at)
            made.add(key(i), b"", 32, at)
    assert hits > 0.5 * 60 * 120


def test_memory_stays_a_multiple_of_what_is_resident() -> None:
    made = ranking(200)
    for n in range(20_000):
        made.use(key(n % 200), 1000.0 + n)
    assert made.entries < 100 * 64


def test_promises_that_each_request_renews_took_memory_until_the_first_of_them_ended() -> None:
    made, promises = ranking(10), Reservations(40)
    for n in range(5_000):
        made.reserve(key(n % 10), 600_000.0 + n)
        assert promises.take(key(n % 10), wish("a", 600_000.0 + n), float(n))
    assert made.entries < 1_000
    assert promises.entries < 1_000
    assert made.pop(1, 600_000.0) is None, "all were renewed"
    assert made.pop(10, 700_000.0) is not None


def test_pool_without_room_for_a_single_chunk_breaks_nothing() -> None:
    made = Ranking(0, recompute)
    made.add(key(1), b"", 32, 0.0)
    assert made.pop(1, 1.0) == [key(1)]
    assert made.pop(1, 2.0) is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("aurpbf"), st.integers(0, 30)), max_size=120))
def test_no_chunk_is_ever_without_the_parent_that_was_there(steps: list[tuple[str, int]]) -> None:
    made, at, busy = ranking(), 0.0, set[bytes]()
    for what, i in steps:
        at += 1
        if what == "a" and key(i) not in made:
            made.add(key(i), key(i // 2) if i else b"", i, at)
        elif what == "u":
            made.use(key(i), at)
        elif what == "r" and key(i) in made:
            made.reserve(key(i), at + i)
        elif what == "b" and key(i) in made:
            made.set_busy(key(i), True)
            busy.add(key(i))
        elif what == "f" and key(i) in busy:
            made.set_busy(key(i), False)
            busy.discard(key(i))
        elif what == "p":
            before = set(made)
            gone = made.pop(1 + i % 3, at)
            after = set(made)
            assert before - after == set(gone or ())
            assert not busy & set(gone or ())
            with_parent = {child for child in range(1, 31) if key(child) in after and key(child // 2) in before}
            assert all(key(child // 2) in after for child in with_parent)


# -- promises


def wish(tenant: str, until: float = 100.0) -> Wish:
    return Wish(pin_until=until, tenant=tenant)


def test_one_tenant_has_a_quarter_and_all_have_half() -> None:
    made = Reservations(100)
    kept = {
        tenant: sum(made.take(key(1000 * n + i), wish(tenant), 0.0) for i in range(40)) for n, tenant in enumerate("abc")
    }
    assert kept == {"a": 25, "b": 25, "c": 0}
    assert made.take(key(0), wish("a", 200.0), 50.0), "its own again, for longer"
    assert made.take(key(9999), wish("c", 300.0), 100.0), "the others' time is over"


# -- places


def test_chunks_of_a_prompt_follow_one_another() -> None:
    trail, ends = Trail(), {key(i) + bytes(4): 32 * i for i in range(1, 9)}
    names = list(ends)
    first = trail.places(names[2:4], ends)
    assert first == {names[2]: Place(names[1], 96), names[3]: Place(names[2], 128)}
    assert trail.places(names[4:5], ends) == {names[4]: Place(names[3], 160)}
    assert trail.places(names[:1], ends) == {names[0]: Place(b"", 32)}
    assert trail.places([key(77) + bytes(4)], ends) == {key(77) + bytes(4): Place(b"", 0)}


def test_kv_groups_have_chains_of_their_own() -> None:
    ends = {key(i) + bytes([0, 0, 0, group]): 32 * i for i in (1, 2) for group in (0, 1)}
    places = Trail().places(ends, ends)
    assert places[key(2) + bytes([0, 0, 0, 1])].parent == key(1) + bytes([0, 0, 0, 1])


def test_promise_is_broken_only_if_the_chunk_goes_before_its_time() -> None:
    promises = Reservations(100)
    for i in range(3):
        assert promises.take(key(i), Wish(pin_until=10.0 + i, tenant="one"), 0.0)
    assert not promises.lose(key(0), 10.0), "its time is over"
    assert promises.lose(key(1), 10.0)
    assert not promises.lose(key(1), 10.0), "it was lost before"
    assert not promises.lose(key(9), 10.0), "nobody was promised that"
    assert promises.lose_all(11.0) == 1
    assert promises.lose_all(11.0) == 0


def test_what_was_lost_counts_against_no_quota() -> None:
    promises = Reservations(4)  # one for each tenant
    assert promises.take(key(1), Wish(pin_until=10.0, tenant="one"), 0.0)
    assert not promises.take(key(2), Wish(pin_until=10.0, tenant="one"), 0.0)
    promises.lose(key(1), 1.0)
    assert promises.take(key(2), Wish(pin_until=10.0, tenant="one"), 1.0)
    promises.lose_all(1.0)
    assert promises.take(key(3), Wish(pin_until=10.0, tenant="one"), 1.0)
