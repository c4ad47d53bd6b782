"""Prediction against truth: how far a replica's picture is believed, from what engines report as cached.

Two running means per picture. Over-prediction is what hurts (a request is sent somewhere for nothing), so `trust` falls by
it alone and policies discount with it. Any lasting difference, in either direction, means that the picture does not match
the engine (another seed, template or block size, lost events): it has drifted, and the replica is routed by history until
the picture, which is compared all the while, is right again.
"""

from __future__ import annotations

from typing import Final

_WEIGHT: Final = 0.1  # of the newest answer in the running means: about the last 20 count
_DRIFT_AT: Final = 0.5  # of the tokens wrong, on average
_HEALED_AT: Final = 0.2
_LEAST_ANSWERS: Final = 12  # before anybody is called drifting
_LEAST_BLOCKS: Final = 2  # shorter matches say nothing: one block is the resolution


class Trust:
    """Running comparison for one picture. Pure."""

    __slots__ = ("_answers", "_error", "_over", "drifted")

    def __init__(self) -> None:
        self._answers = 0
        self._over = 0.0
        self._error = 0.0
        self.drifted = False

    @property
    def trust(self) -> float:
        """1: predictions hold; 0: nothing that was predicted was there."""
        return 1.0 - self._over

    @property
    def error(self) -> float:
        """Mean share of tokens that were predicted wrongly, either way, beyond one block."""
        return self._error

    def observe(self, predicted: int, actual: int, block_tokens: int) -> bool:
        """One answer, in cached tokens. True if `drifted` changed."""
        most = max(predicted, actual)
        if most < _LEAST_BLOCKS * block_tokens:
            return False
        self._answers += 1
        over = max(0, predicted - actual - block_tokens) / most
        error = max(0, abs(predicted - actual) - block_tokens) / most
        self._over += _WEIGHT * (over - self._over)
        self._error += _WEIGHT * (error - self._error)
        before = self.drifted
        if self._error < _HEALED_AT:
            self.drifted = False
        elif self._error > _DRIFT_AT and self._answers >= _LEAST_ANSWERS:
            self.drifted = True
        return self.drifted != before
