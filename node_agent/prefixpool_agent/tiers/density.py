"""How soon chunks of one kind may be hit, from counts of what happened to such chunks at each age. Pure.

At each age: hits over the seconds waited for them is the rate of hits there. A chunk may be kept until any later age, and
then go: that has some chance of a hit, for some expected time in the pool. Its density is the best such ratio over all ages
to stop at (the Gittins index of the wait). A chunk that will be due in a minute is thus worth keeping although nothing is
likely within seconds; one whose time has passed is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import exp, log2
from typing import Final

AGES: Final = 48
EDGES_S: Final = (0.0, *(0.125 * 2 ** (i / 2) for i in range(AGES)))  # two ages an octave, the last one without an end
PRIOR: Final = 20.0  # so many chunks are imagined to have waited at each age, with the rate of all kinds together
_FEW: Final = 2.0  # and so many, over all kinds, that say "least recently used"
_WIDTHS_S: Final = [high - low for low, high in pairwise(EDGES_S)]
_MIDDLES_S: Final = [(low + high) / 2 for low, high in pairwise(EDGES_S)]


def age_of(seconds: float) -> int:
    """Number of the age."""
    if seconds < EDGES_S[1]:
        return 0
    return min(1 + int(2 * log2(seconds / EDGES_S[1])), AGES - 1)


def densities(hits: Sequence[Sequence[float]], waited_s: Sequence[Sequence[float]]) -> list[list[float]]:
    """Expected hits per second in the pool, by kind and age, from hits and waiting by kind and age."""
    rates = [
        (sum(row[age] for row in hits) + _FEW) / (sum(row[age] for row in waited_s) + _FEW * (1.0 + 4.0 * middle_s))
        for age, middle_s in enumerate(_MIDDLES_S)
    ]
    return [_density(_shrunk(*row, rates)) for row in zip(hits, waited_s, strict=True)]


def _shrunk(hits: Sequence[float], waited_s: Sequence[float], rates: Sequence[float]) -> list[float]:
    """Rates of one kind: where little was seen, those of all kinds."""
    seconds = [PRIOR * (middle_s + 0.1) for middle_s in _MIDDLES_S]
    return [(hits[age] + rates[age] * seconds[age]) / (waited_s[age] + seconds[age]) for age in range(AGES)]


def _density(rates: Sequence[float]) -> list[float]:
    chances = [1.0 - exp(-rate * width_s) for rate, width_s in zip(rates, _WIDTHS_S, strict=True)]
    times_s = [chance / rate for chance, rate in zip(chances, rates, strict=True)]  # in the pool, by hit or by end of age
    return [_best(chances, times_s, age) for age in range(AGES)]


def _best(chances: Sequence[float], times_s: Sequence[float], age: int) -> float:
    """Over all ages to stop at, from the middle of this one on."""
    left = 1.0 - chances[age] / 2
    hit, time_s = chances[age] / 2, times_s[age] / 2
    best = hit / time_s
    for later in range(age + 1, AGES):
        hit += left * chances[later]
        time_s += left * times_s[later]
        left *= 1.0 - chances[later]
        best = max(best, hit / time_s)
    return best
