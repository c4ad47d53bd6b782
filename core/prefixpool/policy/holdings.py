"""How much of one prompt each replica holds: levels of the index, read for single candidates."""

from __future__ import annotations

from collections.abc import Sequence

from prefixpool.levels import Level
from prefixpool.policy.base import Candidate, Candidates, Query, Score
from prefixpool.policy.loading import Depths, cheapest


class Holdings:
    """Depths never exceed the prompt less its last token, which the engine always computes."""

    __slots__ = ("anybody", "anybody_near", "deepest", "deepest_first", "prompt_tokens")

    def __init__(self, levels: Sequence[Level], prompt_tokens: int) -> None:
        most = max(prompt_tokens - 1, 0)
        self.prompt_tokens = prompt_tokens
        self.deepest_first = [(min(tokens, most), device, host, held) for tokens, device, host, held in reversed(levels)]
        self.anybody, self.anybody_near = (levels[0].held, levels[0].host) if levels else (0, 0)
        self.deepest = self.deepest_first[0][0] if levels else 0

    def of(self, bit: int) -> tuple[int, int, int]:
        """How deep a holder has the prompt: the fields of `Depths`, plain because up to 33 are asked for per decision."""
        if not bit & self.anybody:
            return 0, 0, 0
        anywhere = near = 0
        for tokens, device, host, held in self.deepest_first:
            if held & bit:
                if not bit & self.anybody_near:
                    return 0, 0, tokens
                anywhere = anywhere or tokens
                if host & bit:
                    near = near or tokens
                    if device & bit:
                        return tokens, near, anywhere
        return 0, near, anywhere

    def predicted(self, candidate: Candidate) -> int:
        """Cached tokens to expect, loaded ones included, as far as predictions for this replica are trusted."""
        depths = Depths(*self.of(candidate.bit))
        return int(cheapest(depths, self.prompt_tokens, candidate.rates).cached * candidate.trust)

    def score(self, member: Candidate) -> Score:
        """One candidate's numbers, its requests in flight as total."""
        depths = Depths(*self.of(member.bit))
        cut = cheapest(depths, self.prompt_tokens, member.rates)
        return Score(
            name=member.name,
            device_tokens=depths.device,
            host_tokens=depths.host - depths.device,
            disk_tokens=depths.held - depths.host,
            held_tokens=depths.held,
            cached_tokens=cut.cached,
            load_s=cut.load_s,
            inflight=member.inflight,
            queue_s=member.wait_s,
            prefill_s=cut.compute_s,
            total=float(member.inflight),
            gated=False,
        )


def plain_scores(query: Query, candidates: Candidates) -> list[Score]:
    """Numbers of policies that count requests in flight."""
    holdings = Holdings(query.levels, query.prompt_tokens)
    return [holdings.score(member) for member in candidates]
