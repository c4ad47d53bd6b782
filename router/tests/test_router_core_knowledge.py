"""What a replica is believed to hold between a request's end and the agent's account of it."""

from __future__ import annotations

import pytest

from prefixpool.wire import Tier
from prefixpool_router.knowledge import CONFIRM_S, Knowledge, Picture

HASHES, DEPTHS = [11, 12, 13], [32, 64, 96]


class Known:
    """One picture, with what is believed of `HASHES`."""

    def __init__(self) -> None:
        self.knowledge = Knowledge(1 << 22)
        self.picture = Picture(self.knowledge)

    def believed(self) -> int:
        """Depth in tokens."""
        levels = self.knowledge.walk(HASHES, 32).levels
        return max((level.tokens for level in levels if level.held & self.picture.bit), default=0)


@pytest.fixture
def known() -> Known:
    return Known()


def test_prefix_of_an_ended_request_is_believed_until_the_agent_should_have_told(known: Known) -> None:
    known.picture.promise(HASHES, lambda known: DEPTHS[known:], 100.0).confirm_by(CONFIRM_S)
    assert known.believed() == 96
    known.picture.expire(CONFIRM_S)
    assert known.believed() == 0


@pytest.mark.parametrize("gone", [[13], [12, 13], HASHES])
def test_what_is_evicted_right_behind_its_request_is_not_believed_any_longer(known: Known, gone: list[int]) -> None:
    promise = known.picture.promise(HASHES, lambda known: DEPTHS[known:], 100.0)
    known.picture.publish(HASHES, DEPTHS, Tier.DEVICE)
    promise.confirm_by(CONFIRM_S)
    known.picture.retract(gone, Tier.DEVICE)
    assert known.believed() == 96 - 32 * len(gone)


def test_eviction_does_not_end_the_promise_of_a_running_request(known: Known) -> None:
    ended, running = (known.picture.promise(HASHES, lambda known: DEPTHS[known:], 100.0) for _ in range(2))
    ended.confirm_by(CONFIRM_S)
    known.picture.retract(HASHES, Tier.DEVICE)
    assert known.believed() == 96, "it is computing them again"
    running.confirm_by(CONFIRM_S)
    known.picture.expire(CONFIRM_S)
    assert known.believed() == 0


def test_eviction_of_other_text_ends_no_promise(known: Known) -> None:
    known.picture.promise(HASHES, lambda known: DEPTHS[known:], 100.0).confirm_by(CONFIRM_S)
    known.picture.publish([99], [32], Tier.DEVICE)
    known.picture.retract([99], Tier.DEVICE)
    assert known.believed() == 96
