"""What is expected of a chunk, from what happened to others like it."""

from __future__ import annotations

from random import Random

from prefixpool_agent.tiers.density import AGES, EDGES_S, age_of, densities
from prefixpool_agent.tiers.reuse import Reuse


def key(i: int) -> bytes:
    return i.to_bytes(8, "big")


def counted(**at_age: tuple[float, float]) -> list[float]:
    """Density by age of the only kind: `at_age`: `s<seconds>` -> hits, seconds waited."""
    hits, waited_s = [0.0] * AGES, [0.0] * AGES
    for name, (hit, waited) in at_age.items():
        hits[age_of(float(name[1:]))], waited_s[age_of(float(name[1:]))] = hit, waited
    return densities([hits], [waited_s])[0]


def test_ages_follow_one_another_without_a_gap() -> None:
    assert [age_of(edge) for edge in EDGES_S[:-1]] == list(range(AGES))
    assert age_of(1e12) == AGES - 1


def test_with_nothing_counted_older_is_worth_less() -> None:
    found = counted()
    assert found == sorted(found, reverse=True)


def test_rate_of_hits_is_learned_where_they_happen() -> None:
    """10,000 hits in 100,000 s, and nobody comes back later."""
    found = counted(s10=(10_000, 100_000), s1000=(0, 1e9))
    assert abs(found[age_of(10)] - 0.1) < 0.01
    assert found[age_of(1000)] < 0.001


def test_what_will_be_due_is_worth_more_the_nearer_that_is() -> None:
    """All are hit at the age of 64 s, none before."""
    waits = {f"s{edge}": (0.0, 1e6) for edge in EDGES_S[1:] if edge < 60}
    found = counted(**waits, s64=(100_000, 1e6))
    young, soon, due = found[age_of(1)], found[age_of(32)], found[age_of(64)]
    assert 1 / 80 < young < soon < due


def test_kinds_are_told_apart() -> None:
    made, draw = Reuse(1000, 1000), Random(1)
    for n in range(20_000):
        made.seen(key(draw.randrange(100)), 3, n / 10)  # come back within seconds
        made.seen(key(1000 + n), 0, n / 10)  # never come back
    assert made.of(3, 5.0) > 20 * made.of(0, 5.0)


def test_waiting_that_goes_on_counts() -> None:
    """Nobody is ever asked for again, and the sample is not full: nothing ends, and yet the rate must fall."""
    made = Reuse(10_000, 10_000)
    fresh = made.of(0, 100.0)
    for n in range(9000):
        made.seen(key(n), 0, n / 10)
    assert made.of(0, 100.0) < 0.1 * fresh


def test_a_sample_says_what_all_would() -> None:
    few, everything, draw = Reuse(500, 20_000), Reuse(20_000, 20_000), Random(1)
    for n in range(60_000):
        at, i = n / 100, int(draw.paretovariate(0.5)) % 5000
        for made in (few, everything):
            made.seen(key(i), 0, at)
    assert 0.5 < few.of(0, 60.0) / everything.of(0, 60.0) < 2.0


def test_a_changed_habit_is_learned_within_some_samples() -> None:
    made = Reuse(256, 256)
    for n in range(5000):
        made.seen(key(n % 50), 0, n / 10)  # every 5 s
    often = made.of(0, 4.0)
    for n in range(5000):
        made.seen(key(100 + n), 0, 500 + n / 10)  # never
    assert made.of(0, 4.0) < 0.2 * often


def test_sample_stays_within_its_size() -> None:
    made = Reuse(100, 100)
    for n in range(5000):
        made.seen(key(n), 0, float(n))
    assert len(made._waits) <= 100
    assert len(made._to_settle) <= 400


def test_a_clock_that_steps_back_breaks_nothing() -> None:
    made = Reuse(100, 100)
    for at in (100.0, 50.0, 1e9, 0.0):
        made.seen(key(1), 0, at)
    assert made.of(0, 1.0) > 0
