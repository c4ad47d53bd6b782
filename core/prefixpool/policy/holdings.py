"""How much of one prompt each replica holds: levels of the index, read for single candidates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

from prefixpool.index import Level
from prefixpool.policy.base import Candidate, Candidates, Query, Score

FALLBACKS: Final = 3  # how many others a choice names


class Holdings:
    """Depths never exceed the prompt less its last token, which the engine always computes."""

    __slots__ = ("anybody", "deepest", "deepest_first")

    def __init__(self, levels: Sequence[Level], prompt_tokens: int) -> None:
        most = max(prompt_tokens - 1, 0)
        self.deepest_first = [(min(tokens, most), device, held) for tokens, device, held in reversed(levels)]
        self.anybody = levels[0].held if levels else 0
        self.deepest = self.deepest_first[0][0] if levels else 0

    def of(self, bit: int) -> tuple[int, int]:
        """Tokens of the prompt that a holder has on its device, and in any tier."""
        if not bit & self.anybody:
            return 0, 0
        anywhere = 0
        for tokens, device, held in self.deepest_first:
            if held & bit:
                anywhere = anywhere or tokens
                if device & bit:
                    return tokens, anywhere
        return 0, anywhere

    def predicted(self, candidate: Candidate) -> int:
        """Cached tokens to expect, in any tier, as far as predictions for this replica are trusted."""
        return int(self.of(candidate.bit)[1] * candidate.trust)


def others(names: Iterable[str], chosen: str) -> tuple[str, ...]:
    """The first few names but the chosen one."""
    return tuple(islice((name for name in names if name != chosen), FALLBACKS))


def plain_scores(query: Query, candidates: Candidates) -> list[Score]:
    """Numbers of policies that count requests in flight."""
    holdings = Holdings(query.levels, query.prompt_tokens)
    out = []
    for member in candidates:
        device, held = holdings.of(member.bit)
        prefill_s = member.rates.prefill_s(max(query.prompt_tokens - held, 0), held)
        out.append(
            Score(member.name, device, held, member.inflight, member.wait_s, prefill_s, float(member.inflight), gated=False)
        )
    return out
