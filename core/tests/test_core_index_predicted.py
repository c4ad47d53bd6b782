"""Predictions: counted, ended exactly once, bounded."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from prefixpool.predicted import NOTHING, Predicted


def add(predicted: Predicted, column: int, hashes: Sequence[int], depths: Sequence[int], until: float) -> int:
    return predicted.add(column, hashes, lambda known: depths[known:], until)


def test_a_prediction_ends_exactly_once() -> None:
    predicted = Predicted(1000)
    ticket = add(predicted, 0, [1, 2, 3], [16, 32, 48], until=5.0)
    assert predicted.count(0) == len(predicted) == 3
    assert predicted.remove(ticket)
    assert not predicted.remove(ticket)
    assert predicted.expire(100.0) == 0
    assert len(predicted) == predicted.count(0) == 0
    assert not predicted.marks


def test_it_ends_by_itself_at_its_time() -> None:
    predicted = Predicted(1000)
    late = add(predicted, 0, [1], [16], until=5.0)
    early = add(predicted, 1, [1], [16], until=2.0)
    assert predicted.expire(1.9) == 0
    assert predicted.expire(2.0) == 1
    assert not predicted.remove(early)
    assert (predicted.count(0), predicted.count(1)) == (1, 0)
    assert predicted.remove(late)


def test_common_boundaries_stay_until_the_last_prediction_ends() -> None:
    predicted = Predicted(1000)
    first = add(predicted, 0, [1, 2], [16, 32], until=9.0)
    second = add(predicted, 0, [1, 2, 3], [16, 32, 48], until=9.0)
    other = add(predicted, 5, [1], [16], until=9.0)
    predicted.remove(second)
    assert set(predicted.marks) == {1, 2}
    predicted.remove(first)
    assert set(predicted.marks) == {1}
    assert predicted.count(5) == 1
    predicted.remove(other)
    assert not predicted.marks


def test_nothing_predicted_is_no_ticket() -> None:
    predicted = Predicted(1000)
    assert add(predicted, 0, [], [], until=1.0) == NOTHING
    assert not predicted.remove(NOTHING)
    assert predicted.count(7) == 0


def test_a_dropped_replica_is_forgotten_and_its_tickets_are_void() -> None:
    predicted = Predicted(1000)
    gone = add(predicted, 0, [1, 2], [16, 32], until=9.0)
    stays = add(predicted, 1, [2], [32], until=9.0)
    predicted.drop_column(0)
    assert not predicted.remove(gone)
    assert set(predicted.marks) == {2}
    assert predicted.remove(stays)
    predicted.drop_column(33)


def test_beyond_the_capacity_those_that_end_first_go() -> None:
    predicted = Predicted(10)
    late = add(predicted, 0, [1, 2, 3, 4], [1, 2, 3, 4], until=9.0)
    soon = add(predicted, 0, [5, 6, 7, 8], [1, 2, 3, 4], until=1.0)
    new = add(predicted, 0, [9, 10, 11, 12], [1, 2, 3, 4], until=5.0)
    assert (predicted.evicted, len(predicted)) == (1, 8)
    assert not predicted.remove(soon)
    assert predicted.remove(late)
    assert predicted.remove(new)


def test_one_prediction_larger_than_the_capacity_leaves_nothing_behind() -> None:
    predicted = Predicted(2)
    ticket = add(predicted, 0, [1, 2, 3], [1, 2, 3], until=1.0)
    assert not predicted.remove(ticket)
    assert not predicted.marks


def test_tickets_of_long_lives_taken_back_early_do_not_pile_up() -> None:
    predicted = Predicted(1000)
    for number in range(10_000):
        predicted.remove(add(predicted, 0, [number], [16], until=1e9))
    assert len(predicted._ends) < 200


def chain(deepest: int) -> list[int]:
    """Of a tree of prefixes: the boundary before n is n // 2."""
    return [deepest >> shift for shift in reversed(range(deepest.bit_length()))]


@given(st.integers(0, 2**32))
def test_marks_agree_with_a_model(seed: int) -> None:
    draw, predicted, model = random.Random(seed), Predicted(10**6), dict[int, tuple[int, list[int], float]]()
    now = 0.0
    for _ in range(60):
        match draw.randrange(4):
            case 0 | 1:
                column, hashes, until = draw.randrange(3), chain(draw.randrange(1, 64)), now + draw.random() * 9
                model[add(predicted, column, hashes, [16] * len(hashes), until)] = (column, hashes, until)
            case 2 if model:
                ticket = draw.choice(list(model))
                del model[ticket]
                assert predicted.remove(ticket)
            case _:
                now += draw.random()
                predicted.expire(now)
                model = {ticket: entry for ticket, entry in model.items() if entry[2] > now}
    expected: dict[int, int] = {}
    for column, hashes, _ in model.values():
        for key in hashes:
            expected[key] = expected.get(key, 0) | 1 << 3 * column
    assert {key: value >> 24 for key, value in predicted.marks.items()} == expected
    assert len(predicted) == sum(map(int.bit_count, expected.values()))
    for ticket, (_, hashes, _) in model.items():
        assert predicted.concerns(ticket, {hashes[-1]})
        assert not predicted.concerns(ticket, {2 * hashes[-1]})


@given(st.integers(0, 2**32))
def test_chains_that_begin_anywhere_promise_nothing_else_and_leave_nothing(seed: int) -> None:
    """What the index has is left out at the front, and later it may have less."""
    draw, predicted, tickets = random.Random(seed), Predicted(10**6), dict[int, list[int]]()
    for _ in range(60):
        if tickets and draw.random() < 0.4:
            ticket = draw.choice(list(tickets))
            del tickets[ticket]
            assert predicted.remove(ticket)
        else:
            hashes = chain(draw.randrange(1, 64))
            hashes = hashes[draw.randrange(len(hashes)) :]
            tickets[add(predicted, 0, hashes, [16] * len(hashes), until=9.0)] = hashes
        assert set(predicted.marks) <= {key for hashes in tickets.values() for key in chain(hashes[-1])}
    for ticket in tickets:
        assert predicted.remove(ticket)
    assert not predicted.marks
    assert len(predicted) == predicted.count(0) == 0
