"""What a token costs on this replica, estimated from the requests that it served. Pure: no clock, no I/O.

    prefill of m uncached tokens behind c cached ones:  p0 + p1*m + p2*m*(m + 2*c)
    n decode steps beside b other sequences:            n*d0 + n*b*d1

One linear model for both, because an answer that is not streamed shows only their sum. Rows are weighted by relative error
and forgotten exponentially (recursive least squares in its decayed normal equations; five unknowns are solved in 0.1 ms,
and so can be kept non-negative). Queueing would pollute the figures: a prefill counts only if no other ran at
the same time, and from a decode the time of other prefills is taken off; `Timeline` decides that when everything that could
have overlapped is over.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from prefixpool.wire import Costs

FORGETTING: Final = 0.995  # a row's weight after 200 newer ones: 37 %
MIN_ROWS: Final = 3  # fewer say too little to publish
LEAST_SHARE: Final = 0.5  # of the time that was to be expected: a row of less counts as if it were one of so much
FRESH: Final = 16  # our own use of the figures may be so many rows behind, at first a sixteenth of all
NOISE_S: Final = 0.005  # absolute noise of a measurement: keeps rows of very short times from dominating
MIN_STEPS: Final = 3  # decode times of fewer steps are mostly noise
MIN_UNDISTURBED: Final = 0.3  # of a decode's time must be free of other prefills
OUTPUT_WEIGHT: Final = 0.02  # of a new answer in the mean length

# How strongly each of p0, p1, p2, d0, d1 is pulled towards zero, relative to what the rows say of it: a single request must
# be explained by the linear terms, not by a constant or a square.
_RIDGE: Final = (1e-4, 1e-6, 1e-2, 1e-6, 1e-3)  # weighed by simulation: short prompts must not invent a square term

MAX_LIVE: Final = 4096
MAX_RECENT: Final = 512


class Served(NamedTuple):
    """One request that ended. Times are monotonic seconds; tokens 0 = unknown. `first_s` 0: never answered."""

    id: str
    at_s: float
    first_s: float
    end_s: float
    uncached: int
    cached: int
    output: int
    streamed: bool  # `first_s` is when the first token came; else when the whole answer did


class Clean(NamedTuple):
    """A request, and how far others disturbed it."""

    served: Served
    prefill_alone: bool  # no other prefill between arrival and first token
    decode_alone: bool  # no other prefill between first and last token
    decode_s: float  # between first and last token, without the time of other prefills
    decode_steps: int  # steps in that time: each other prefill took at least one
    others: float  # mean number of other sequences that decoded beside it


class Timeline:
    """Knows which requests overlapped. Bounded: the oldest live and ended requests are forgotten first.

    `prefill_s` estimates the prefill of a request whose first token was not seen, because its answer was not streamed.
    """

    def __init__(self, prefill_s: Callable[[Served], float]) -> None:
        self._prefill_s = prefill_s
        self._live: OrderedDict[str, float] = OrderedDict()
        self._waiting: deque[Served] = deque()
        self._recent: deque[Served] = deque(maxlen=MAX_RECENT)

    def arrived(self, id_: str, at_s: float) -> None:
        """A request passed the gate."""
        self._live[id_] = at_s
        if len(self._live) > MAX_LIVE:
            self._live.popitem(last=False)

    def ended(self, served: Served) -> list[Clean]:
        """A request is over. Returns those, this one or earlier ones, about which nothing new can be learned any more."""
        self._live.pop(served.id, None)
        self._recent.append(served)
        self._waiting.append(served)
        if len(self._waiting) > MAX_RECENT // 2:
            self._waiting.popleft()
        oldest = next(iter(self._live.values()), float("inf"))  # of several gates, within microseconds
        ready = [s for s in self._waiting if s.end_s <= oldest]
        if ready:
            self._waiting = deque(s for s in self._waiting if s.end_s > oldest)
        return [self._judge(s) for s in ready]

    def forget(self) -> None:
        """The engine is gone, and all requests with it."""
        self._live.clear()
        self._waiting.clear()
        self._recent.clear()

    def _judge(self, served: Served) -> Clean:
        others = [o for o in self._recent if o is not served and o.end_s > served.at_s and o.at_s < served.end_s]
        prefills = [(o.at_s, self._first(o)) for o in others]
        first = served.first_s
        disturbed = [(a, b) for a, b in prefills if _overlap(a, b, first, served.end_s) > 0]
        decode_s = served.end_s - first
        beside = sum(_overlap(b, o.end_s, first, served.end_s) for o, (_, b) in zip(others, prefills, strict=True))
        return Clean(
            served,
            prefill_alone=not any(_overlap(a, b, served.at_s, first) > 0 for a, b in prefills),
            decode_alone=not disturbed,
            decode_s=decode_s - _covered(disturbed, first, served.end_s),
            decode_steps=max(0, served.output - 1 - len(disturbed)),
            others=beside / decode_s if decode_s > 0 else 0.0,
        )

    def _first(self, served: Served) -> float:
        """When its prefill was over."""
        if served.streamed:
            return served.first_s or served.end_s
        return min(served.end_s, served.at_s + self._prefill_s(served))


class CostModel:
    """Running estimate of `wire.Costs`."""

    def __init__(self, start: Costs | None = None) -> None:
        """`start`: figures of an earlier life of the agent, published until there are enough rows of our own."""
        self._start = start or Costs()
        self._fit = NonNegativeFit(_RIDGE)
        self._prefill_rows = 0
        self._decode_rows = 0
        self._output = self._start.output_tokens
        self._outputs = 0
        self._costs: Costs | None = None  # asked for more often than there are new rows

    def observe(self, clean: Clean) -> None:
        """Learn from one request; requests that failed or lack figures are ignored."""
        served = clean.served
        if not served.first_s or not served.output:
            return
        self._costs = None
        self._outputs += 1
        weight = max(OUTPUT_WEIGHT, 1.0 / self._outputs)
        self._output += weight * (served.output - self._output)
        if not served.streamed:
            if clean.prefill_alone and clean.decode_alone:
                steps = served.output - 1
                self._add(served.end_s - served.at_s, _prefill_row(served), (steps, steps * clean.others))
            return
        if clean.prefill_alone:
            self._add(served.first_s - served.at_s, _prefill_row(served), (0.0, 0.0))
        if clean.decode_steps >= MIN_STEPS and clean.decode_s >= MIN_UNDISTURBED * (served.end_s - served.first_s):
            steps = clean.decode_steps
            self._add(clean.decode_s, (0.0, 0.0, 0.0), (steps, steps * clean.others))

    def prefill_s(self, served: Served) -> float:
        """Estimated prefill of a request, of late; infinite while there is no estimate."""
        costs = self._figures(self._fit.recent())
        m, c = served.uncached, served.cached
        seconds = costs.prefill_s_per_token * m + costs.prefill_s_per_token2 * m * (m + 2 * c)
        return seconds or float("inf")

    def costs(self) -> Costs:
        """Figures that are not measured yet are 0, or what `start` said."""
        if self._costs is None:
            self._costs = self._figures(self._fit.solve())
        return self._costs

    def _figures(self, solution: Sequence[float]) -> Costs:
        _, p1, p2, d0, d1 = solution
        prefill, decode = self._prefill_rows >= MIN_ROWS, self._decode_rows >= MIN_ROWS
        start = self._start
        return Costs(
            prefill_s_per_token=p1 if prefill else start.prefill_s_per_token,
            prefill_s_per_token2=p2 if prefill else start.prefill_s_per_token2,
            decode_step_s=d0 if decode else start.decode_step_s,
            decode_step_s_per_sequence=d1 if decode else start.decode_step_s_per_sequence,
            output_tokens=self._output,
            samples=start.samples + self._outputs,
        )

    def _add(self, seconds: float, prefill: Sequence[float], decode: Sequence[float]) -> None:
        if seconds <= 0:
            return
        self._prefill_rows += prefill[1] > 0
        self._decode_rows += decode[0] > 0
        self._fit.add((*prefill, *decode), seconds)


class NonNegativeFit:
    """Least squares over rows that fade, with non-negative coefficients and a pull towards zero per coefficient."""

    def __init__(self, ridge: Sequence[float]) -> None:
        self._ridge = ridge
        size = len(ridge)
        self._a = [[0.0] * size for _ in range(size)]
        self._b = [0.0] * size
        self._recent = [0.0] * size
        self._rows = self._since = 0  # all, and those since `_recent` was solved

    def add(self, row: Sequence[float], value: float) -> None:
        """`value` > 0; errors count relative to it, or else one that is far too small would count more than all others."""
        expected = sum(each * x for each, x in zip(self.recent(), row, strict=True))
        weight = 1.0 / (max(value, LEAST_SHARE * expected) + NOISE_S) ** 2
        for i, line in enumerate(self._a):
            for j in range(len(line)):
                line[j] = line[j] * FORGETTING + weight * row[i] * row[j]
            self._b[i] = self._b[i] * FORGETTING + weight * row[i] * value
        self._rows += 1
        self._since += 1

    def recent(self) -> list[float]:
        """`solve()` as of some rows ago, however often it is asked for: so few change little."""
        if self._since * FRESH > min(self._rows, FRESH * FRESH):
            self._recent, self._since = self.solve(), 0
        return self._recent

    def solve(self) -> list[float]:
        """One coefficient per column; 0 for those that never occurred or would be negative."""
        active = [i for i in range(len(self._b)) if self._a[i][i] > 0]
        out = [0.0] * len(self._b)
        while active:
            found = self._solve(active)
            share = [value * math.sqrt(self._a[i][i]) for i, value in zip(active, found, strict=True)]
            worst = min(range(len(active)), key=share.__getitem__)
            if share[worst] >= 0:
                for i, value in zip(active, found, strict=True):
                    out[i] = value
                break
            del active[worst]
        return out

    def _solve(self, active: Sequence[int]) -> list[float]:
        a = [[self._a[i][j] * (1.0 + self._ridge[i] if i == j else 1.0) for j in active] for i in active]
        return _solve_positive(a, [self._b[i] for i in active])


def _prefill_row(served: Served) -> tuple[float, float, float]:
    m, c = float(served.uncached), float(served.cached)
    return 1.0, m, m * (m + 2.0 * c)


def _covered(spans: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """Length of the union of spans inside [start, end]."""
    total, reached = 0.0, start
    for a, b in sorted(spans):
        total += max(0.0, min(b, end) - max(a, reached))
        reached = max(reached, min(b, end))
    return total


def _overlap(a: float, b: float, start: float, end: float) -> float:
    return max(0.0, min(b, end) - max(a, start))


def _solve_positive(a: list[list[float]], b: list[float]) -> list[float]:
    """Gaussian elimination; no pivoting needed, `a` is positive definite by its ridge."""
    size = len(b)
    for i in range(size):
        for j in range(i + 1, size):
            factor = a[j][i] / a[i][i]
            for k in range(i, size):
                a[j][k] -= factor * a[i][k]
            b[j] -= factor * b[i]
    x = [0.0] * size
    for i in reversed(range(size)):
        x[i] = (b[i] - sum(a[i][k] * x[k] for k in range(i + 1, size))) / a[i][i]
    return x
