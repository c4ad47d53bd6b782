"""How likely a chunk is asked for again, learned by counting: hits over waiting, by uses and age. Pure."""

from __future__ import annotations

from typing import Final

AGES: Final = 40  # powers of two
FADING: Final = 0.98  # of what was learned, at each new learning
PRIOR: Final = 30.0  # so many imagined events say "least recently used"
_PER_S: Final = 8  # ages are counted in eighths of a second
USES: Final = 4  # classes: never used again, once, twice, more often


class Density:
    """Hits per waiting time, by uses and age. `learn` is called now and then; reading is a look at a table."""

    def __init__(self) -> None:
        self._hits = [[0.0] * AGES for _ in range(USES)]
        self._ends = [[0.0] * AGES for _ in range(USES)]
        self._table: list[list[float]] = []
        self.learn()

    def hit(self, uses: int, age: float) -> None:
        """Used again, so long after its last use."""
        self._hits[uses][_bucket(age)] += 1

    def end(self, uses: int, age: float, count: float = 1.0) -> None:
        """Evicted unused, as far as is known."""
        row, bucket = self._ends[uses], _bucket(age)
        row[bucket] = max(0.0, row[bucket] + count)

    def of(self, uses: int, age: float) -> float:
        """Expected hits per unit of waiting from now on."""
        return self._table[uses][_bucket(age)]

    def learn(self) -> None:
        """Make the table from what was counted, and let that fade."""
        self._table = [_densities(hits, ends) for hits, ends in zip(self._hits, self._ends, strict=True)]
        for rows in (self._hits, self._ends):
            for row in rows:
                row[:] = [count * FADING for count in row]


def _bucket(age_s: float) -> int:
    return min(max(int(age_s * _PER_S), 0).bit_length(), AGES - 1)


def _densities(hits: list[float], ends: list[float]) -> list[float]:
    """Per age: hits beyond it over the waiting beyond it."""
    out = [0.0] * AGES
    for bucket in range(AGES):
        age = _middle(bucket)
        found, waited = PRIOR, PRIOR * (age + 1)
        for later in range(bucket, AGES):
            found += hits[later]
            waited += (hits[later] + ends[later]) * max(_middle(later) - age, age / 4)
        out[bucket] = found / (waited + 1)
    return out


def _middle(bucket: int) -> float:
    return 0.75 * (1 << bucket) if bucket else 0.0
