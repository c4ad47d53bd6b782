"""Facts about blocks that are not there: gone, or saved by an earlier agent and not announced yet. Pure, bounded."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

from prefixpool_agent.residency.limits import Limits

Facts = Sequence[int]  # boundary, token depth, boundary, token depth, ...


class Remembered:
    """Block hash -> facts, the oldest forgotten first.

    A reset or a restored map may fill it beyond its own limit, up to that of all boundaries: what the coming replay asks
    for must not be lost. From then on it does not grow.
    """

    def __init__(self, limits: Limits, counts: Counter[str]) -> None:
        self._limit = limits.remembered
        self._most = max(limits.boundaries, limits.remembered)
        self._counts = counts
        self._facts: OrderedDict[int, Facts] = OrderedDict()
        self._boundaries = 0

    def keep(self, block_hash: int, facts: Facts, *, for_replay: bool = False) -> None:
        """Remember facts of one block, beside those remembered: maps of several replicas may each know some."""
        known, new = self.take(block_hash), tuple(facts)
        self._facts[block_hash] = merged = _merged(known, new) if known and known != new else new
        self._boundaries += len(merged) // 2
        added = (len(merged) - len(known)) // 2
        while self._boundaries > self._most or (added > 0 and not for_replay and self._boundaries > self._limit):
            oldest = len(self.take(next(iter(self._facts)))) // 2
            added -= oldest
            self._counts["remembered_dropped"] += oldest

    def take(self, block_hash: int) -> Facts:
        """The facts of a block, forgotten here; empty if there are none."""
        facts = self._facts.pop(block_hash, ())
        self._boundaries -= len(facts) // 2
        return facts

    def of(self, block_hash: int) -> Facts:
        """The facts of a block, which stay; empty if there are none."""
        return self._facts.get(block_hash, ())

    def items(self) -> Iterator[tuple[int, Facts]]:
        """All, oldest first."""
        return iter(self._facts.items())


def _merged(known: Facts, new: Facts) -> Facts:
    """Of a boundary in both, what is new."""
    pairs = dict(zip(known[::2], known[1::2], strict=True)) | dict(zip(new[::2], new[1::2], strict=True))
    return tuple(number for pair in pairs.items() for number in pair)
