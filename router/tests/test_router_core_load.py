"""How busy a replica is: own requests exactly, others' as agents tell, and prompts that only agents know to be computed."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixpool.wire import HEARTBEAT_S, Load
from prefixpool_router.load import TOLD_AFTER_S, Booking, LoadBook

OLD_S = TOLD_AFTER_S  # a report so much later than a request knows it


def send(book: LoadBook, tokens: int, at_s: float = 0.0, *, whole: bool = True) -> Booking:
    return book.book(tokens, at_s, whole=whole)


def tell(book: LoadBook, backlog: int, at_s: float, *, inflight: int = 0) -> int:
    """What waits, after an agent's report."""
    book.reported(Load(inflight=inflight, prefill_backlog_tokens=backlog), at_s)
    return book.pending_tokens


def test_own_requests_count_at_once_and_once() -> None:
    book = LoadBook()
    booking = send(book, 100)
    assert (book.inflight, book.pending_tokens) == (1, 100)
    tell(book, 100, 0.1, inflight=1)  # the agent has seen it now
    assert (book.inflight, book.pending_tokens) == (1, 100)
    booking.release()
    assert (book.inflight, book.pending_tokens) == (0, 0)


def test_requests_of_other_routers_stay_when_own_ones_end() -> None:
    book = LoadBook()
    booking = send(book, 10)
    tell(book, 50, 0.1, inflight=5)
    booking.release()
    assert (book.inflight, book.pending_tokens) == (4, 40)
    tell(book, 0, 0.2)
    assert (book.inflight, book.pending_tokens) == (0, 0)


def test_an_old_report_is_not_saturation() -> None:
    book = LoadBook()
    tell(book, 10**6, 0.0, inflight=500)
    send(book, 7)
    book.report_expired()
    assert (book.inflight, book.pending_tokens) == (1, 7)


def test_prefill_ends_once_and_release_counts_once() -> None:
    book = LoadBook()
    first, second = send(book, 10), send(book, 20)
    first.prefilled()
    first.prefilled()
    assert (book.inflight, book.pending_tokens) == (2, 20)
    for _ in range(3):
        first.release()
    first.prefilled()
    assert (book.inflight, book.pending_tokens) == (1, 20)
    second.release()
    assert (book.own, book.own_tokens) == (0, 0)


@given(
    st.lists(st.sampled_from(["book", "prefilled", "release", "report", "expire", "wait"]), max_size=200),
    st.integers(0, 2**32),
)
def test_counts_never_go_negative_and_return_to_zero(steps: list[str], seed: int) -> None:
    book, draw, now = LoadBook(), random.Random(seed), 0.0
    bookings = [send(book, 0)]
    for step in steps:
        chosen = draw.choice(bookings)
        if step == "book":
            bookings.append(send(book, draw.randrange(1000), now, whole=draw.random() < 0.7))
        elif step == "report":
            tell(book, draw.randrange(-5, 5000), now, inflight=draw.randrange(-2, 20))
        elif step == "expire":
            book.report_expired()
        elif step == "wait":
            now += draw.random() * OLD_S
        else:
            getattr(chosen, step if step == "prefilled" else "release")()
        assert book.inflight >= book.own >= 0
        assert book.pending_tokens >= book.own_tokens == sum(booking.tokens for booking in bookings)
    for booking in bookings:
        booking.release()
    assert (book.own, book.own_tokens) == (0, 0)
    assert tell(book, 0, now) == book.inflight == 0
    assert (len(book._new), len(book._told), len(book._whole), book._told_tokens) == (0, 0, 0, 0)


# -- answers that are not streamed


def test_a_prompt_waited_for_as_long_as_its_answer_was_decoded() -> None:
    """Where answers are long and not streamed, all replicas seemed to have minutes of prompts before them."""
    book = LoadBook()
    booking = send(book, 4000)
    assert tell(book, 0, OLD_S) == 0
    assert tell(book, 3000, OLD_S + 1) == 3000, "those are others', since a prompt is computed once"
    booking.release()
    assert tell(book, 0, OLD_S + 2) == 0


def test_a_report_older_than_the_request_says_nothing_of_it() -> None:
    book = LoadBook()
    send(book, 4000, at_s=10.0)
    assert tell(book, 0, 10.0 + OLD_S - 0.01) == 4000


def test_what_the_agent_still_counts_waits() -> None:
    book = LoadBook()
    send(book, 4000)
    assert tell(book, 4000, OLD_S) == 4000
    assert tell(book, 1500, OLD_S + 1) == 1500
    assert book.own_tokens == 1500
    assert tell(book, 9000, OLD_S + 2) == 9000


def test_the_oldest_prompts_are_computed_first() -> None:
    book = LoadBook()
    first, second = send(book, 1000), send(book, 2000)
    tell(book, 2500, OLD_S)
    assert (first.tokens, second.tokens) == (500, 2000)
    tell(book, 700, OLD_S + 1)
    assert (first.tokens, second.tokens) == (0, 700)
    second.release()
    assert book.own_tokens == 0


def test_newer_requests_count_beside_what_the_agent_tells() -> None:
    book = LoadBook()
    send(book, 4000, 0.0)
    send(book, 900, OLD_S)
    assert tell(book, 1000, OLD_S) == 1900


def test_streams_tell_their_end_of_prefill_themselves() -> None:
    book = LoadBook()
    stream = send(book, 4000, whole=False)
    assert tell(book, 0, 100.0) == 4000
    stream.prefilled()
    assert tell(book, 0, 101.0) == 0


def test_a_stream_that_waits_explains_the_backlog_before_a_whole_answer_does() -> None:
    book = LoadBook()
    whole, stream = send(book, 3000), send(book, 4000, whole=False)
    assert tell(book, 4000, OLD_S) == 4000
    assert (whole.tokens, stream.tokens) == (0, 4000)


def test_an_agent_that_comes_back_knows_nothing_of_what_was_sent_before() -> None:
    book = LoadBook()
    before = send(book, 4000)
    book.report_expired()
    send(book, 100, 50.0)
    assert tell(book, 0, 100.0) == 4000
    before.release()
    assert tell(book, 0, 101.0) == 0


# -- a small pool of engines that compute prompts one after the other, and decode for a long time

RATE = 8000.0  # prompt tokens a second
LATE_S = 0.03  # of a report, when it is read
REPLICAS = 4


class Span(NamedTuple):
    """When one request was sent, its prompt began and ended to be computed, and its answer ended."""

    sent_s: float
    begun_s: float
    prefilled_s: float
    answered_s: float


class Engine:
    """Knows the truth."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.free_s = 0.0

    def take(self, now: float, tokens: int, decode_s: float) -> Span:
        start = max(now, self.free_s)
        self.free_s = start + tokens / RATE
        self.spans.append(Span(now, start, self.free_s, self.free_s + decode_s))
        return self.spans[-1]

    def load(self, at_s: float) -> Load:
        self.spans = [span for span in self.spans if span.answered_s > at_s]
        known = [span for span in self.spans if span.sent_s <= at_s]
        waits_s = sum(max(0.0, span.prefilled_s - max(at_s, span.begun_s)) for span in known)
        return Load(inflight=len(known), prefill_backlog_tokens=int(waits_s * RATE))


class Simulation:
    """Requests come at random, and each of several routers sends its own where least seems to wait."""

    def __init__(
        self, seed: int, *, routers: int = 1, streamed: float = 0.0, follow: bool = True, agents: bool = True
    ) -> None:
        self.draw = random.Random(seed)
        self.engines = [Engine() for _ in range(REPLICAS)]
        self.books = [[LoadBook() for _ in self.engines] for _ in range(routers)]
        self.streamed, self.follow, self.agents = streamed, follow, agents
        self.choices: list[int] = []
        self.waited_s = 0.0
        self.missed = 0  # tokens between what a book says waits, and what does
        self.steps: list[tuple[float, Booking, str]] = []

    def run(self, seconds: float = 120.0, a_second: float = 4.0) -> Simulation:
        arrival, tick = self.draw.expovariate(a_second), 0.0
        while arrival < seconds:
            while tick <= arrival:
                self.happen(tick)
                self.report(tick)
                tick += 0.05
            self.happen(arrival)
            self.request(arrival)
            arrival += self.draw.expovariate(a_second)
        return self

    def happen(self, now: float) -> None:
        """First bytes and ends until now."""
        self.steps.sort(key=lambda step: step[0])
        while self.steps and self.steps[0][0] <= now:
            _, booking, step = self.steps.pop(0)
            getattr(booking, step)()

    def report(self, now: float) -> None:
        for number, engine in enumerate(self.engines):
            load, true = engine.load(now - LATE_S), engine.load(now).prefill_backlog_tokens
            for books in self.books:
                if self.agents:
                    books[number].reported(load, now)
                self.missed += abs(books[number].pending_tokens - true)

    def request(self, now: float) -> None:
        books = self.draw.choice(self.books)
        tokens = self.draw.choice([300, 1000, 3000, 16000])
        decode_s, streamed, tie = self.draw.uniform(5, 40), self.draw.random() < self.streamed, self.draw.random()
        least = min(book.pending_tokens for book in books)
        tied = [number for number, book in enumerate(books) if book.pending_tokens == least]
        chosen = tied[int(tie * len(tied))]
        booking = send(books[chosen], tokens, now, whole=self.follow and not streamed)
        span = self.engines[chosen].take(now, tokens, decode_s)
        if streamed:
            self.steps.append((span.prefilled_s, booking, "prefilled"))
        self.steps.append((span.answered_s, booking, "release"))
        self.choices.append(chosen)
        self.waited_s += span.begun_s - now


@pytest.mark.parametrize("streamed", [0.0, 0.5])
@pytest.mark.parametrize("routers", [1, 3])
@pytest.mark.parametrize("seed", range(2))
def test_requests_wait_no_longer_and_books_are_nearer_to_the_truth(seed: int, routers: int, streamed: float) -> None:
    before = Simulation(seed, routers=routers, streamed=streamed, follow=False).run()
    after = Simulation(seed, routers=routers, streamed=streamed).run()
    assert after.waited_s <= before.waited_s
    assert after.missed < before.missed / 3


def test_nothing_changes_where_all_answers_are_streamed() -> None:
    before, after = (Simulation(5, routers=2, streamed=1.0, follow=follow).run() for follow in (False, True))
    assert (after.choices, after.waited_s) == (before.choices, before.waited_s)


def test_nothing_changes_without_agents() -> None:
    before, after = (Simulation(5, routers=2, agents=False, follow=follow).run() for follow in (False, True))
    assert (after.choices, after.waited_s) == (before.choices, before.waited_s)


def test_a_heartbeat_comes_while_a_request_is_still_new() -> None:
    """So that the first report that counts is late by no more than it."""
    assert HEARTBEAT_S < TOLD_AFTER_S
