"""Numbers of candidates, as decisions keep them."""

from __future__ import annotations

import random
from operator import attrgetter

import pytest

from prefixpool.policy import Candidate, Candidates
from prefixpool.wire import Costs

ALL = attrgetter(*Candidate.__slots__)


@pytest.mark.parametrize("seed", range(20))
def test_numbers_kept_are_those_of_now_after_any_change(seed: int) -> None:
    draw = random.Random(seed)
    candidates = Candidates(Candidate(f"p{i}", bit=1 << 3 * i, device_tokens=9000) for i in range(5))
    for _ in range(60):
        name = f"p{draw.randrange(5)}"
        if candidates.get(name) is None:
            candidates.add(Candidate(name, bit=1 << 3 * draw.randrange(9)))
        match draw.randrange(6):
            case 0:
                candidates.update(name, inflight=draw.randrange(9), pending_tokens=draw.randrange(9000))
            case 1:
                candidates.update(name, resident=draw.randrange(900), trust=draw.random(), free_tokens=draw.randrange(9000))
            case 2:
                candidates.set_costs(name, Costs(prefill_s_per_token=draw.random(), samples=9))
            case 3:
                candidates.set_place(name, bit=1 << 3 * draw.randrange(9), device_tokens=draw.randrange(9000))
            case 4:
                assert len(candidates.newcomers) <= len(candidates)  # who is one is settled when asked
            case _ if len(candidates) > 1:
                candidates.remove(name)
        assert candidates.numbers() == list(map(ALL, candidates))
        rest = candidates.without({name})
        assert rest.numbers() == list(map(ALL, rest))


def test_numbers_kept_do_not_change_later() -> None:
    candidates = Candidates([Candidate("p0"), Candidate("p1")])
    kept = candidates.numbers()
    before = list(map(Candidate.of, kept))
    candidates.update("p0", inflight=7)
    assert [ALL(candidate) for candidate in before] == kept
    assert {numbers[Candidate.__slots__.index("inflight")] for numbers in candidates.numbers()} == {0, 7}
