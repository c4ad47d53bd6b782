"""The default: where a request costs everybody least, given what each replica holds of its prompt (design: 5).

Warm: the lowest marginal cost among replicas within their bound. Cold everywhere: the ring, so that all routers send the
same new prefix to the same place; the same for new text behind a head that others share, unless that is much dearer. New and
emptied replicas get a share of the hits, or they would stay empty.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import sqrt
from operator import itemgetter
from typing import Final, NamedTuple

from prefixpool.policy.base import Candidate, Candidates, Choice, Query, Reason, Score
from prefixpool.policy.chwbl import placed
from prefixpool.policy.cost import kappa
from prefixpool.policy.holdings import Holdings
from prefixpool.policy.least_load import lightest
from prefixpool.policy.loading import Depths, cheapest
from prefixpool.ring import BOUND, Placement, bound

FEW: Final = 16  # up to so many are all looked at; of more, the lightest, the holders and the ring's place
DEARER: Final = 3.0  # so many times the price is too much for leaving the cheapest, be it over its soft bound or not home
NEAR: Final = 1.02  # prices this close are a tie
SHALLOW: Final = 0.5  # hits up to this part of the prompt are given up for a newcomer at its fair share
DEEP_SHARE: Final = 0.6  # deeper ones at this part of its fair share


class Limits(NamedTuple):
    """Requests in flight that a replica may have, the next one included."""

    soft: float
    hard: float

    @classmethod
    def of(cls, candidates: Candidates) -> Limits:
        mean = candidates.mean_inflight
        slack = max(4.0, 2.0 * sqrt(mean))
        return cls(BOUND * mean + slack / 2, BOUND * mean + slack)


_Priced = tuple[float, Candidate]
_total = itemgetter(0)


class Prefix:
    """See the module."""

    name = "prefix"

    def choose(self, query: Query, candidates: Candidates) -> Choice:
        """Pick the replica where the request costs everybody least."""
        mask = candidates.mask
        holdings = Holdings([level for level in query.levels if level.held & mask], query.prompt_tokens)
        if len(candidates) == 1:
            (only,) = candidates
            return Choice(only.name, Reason.ONLY, holdings.predicted(only))
        if not holdings.deepest:
            return _cold(query, candidates) if query.cold_key else lightest(query, candidates, Reason.NO_CHAIN)
        if candidates.newcomers and (diverted := _divert(query, candidates, holdings)):
            return diverted
        return _cheapest(query, candidates, holdings)

    def scores(self, query: Query, candidates: Candidates) -> list[Score]:
        """All prices, also of those that a large fleet's shortlist leaves out."""
        holdings, limits = Holdings(query.levels, query.prompt_tokens), Limits.of(candidates)
        out = []
        for total, member in _price(query, candidates, holdings, list(candidates)):
            gated = member.inflight + 1 > limits.soft
            out.append(holdings.score(member)._replace(total=total, gated=gated))
        return out


def _cold(query: Query, candidates: Candidates) -> Choice:
    """The key's place, and if all are at their bounds, the next below its bound in requests."""
    placement = _home(query, candidates)
    if not placement.final:
        return placed(query, candidates, query.cold_key, Reason.COLD_MOVED)
    reason = Reason.COLD_MOVED if placement.steps else Reason.COLD
    return Choice(placement.final, reason, 0)


def _home(query: Query, candidates: Candidates) -> Placement:
    """The key's place on the ring among those within their bound, in requests and in queued work."""
    limit = bound(candidates.total_inflight, len(candidates))
    own_s = candidates.by_weight[0].rates.prefill_s(query.prompt_tokens, 0)
    patience_s = BOUND * candidates.mean_wait_s + max(candidates.tau_s, own_s)

    def accepts(name: str) -> bool:
        member = candidates[name]
        return member.inflight < limit and member.wait_s <= patience_s

    return candidates.ring.place(query.cold_key, candidates.loads, accepts)


def _divert(query: Query, candidates: Candidates, holdings: Holdings) -> Choice | None:
    """Sometimes, a newcomer instead of a holder, unless it has its share of the load already."""
    newcomers = candidates.newcomers
    part = 1.0 if holdings.deepest <= SHALLOW * query.prompt_tokens else DEEP_SHARE
    share = part * len(newcomers) / len(candidates)
    if query.draw >= share:
        return None
    member = newcomers[int(query.draw / share * len(newcomers))]
    if member.inflight > candidates.mean_inflight or holdings.of(member.bit)[2] >= holdings.deepest:
        return None
    return Choice(member.name, Reason.FRESH, holdings.predicted(member))


def _cheapest(query: Query, candidates: Candidates, holdings: Holdings) -> Choice:
    home = ""
    if query.cold_key and holdings.deepest < query.cold_tokens:  # only a head is held that others share, too
        home = _home(query, candidates).final
    priced = _price(query, candidates, holdings, _shortlist(query, candidates, home))
    allowed = _within(priced, Limits.of(candidates))
    if not allowed:  # the whole shortlist is above its bound
        return lightest(query, candidates, Reason.OVERFLOW)
    allowed.sort(key=_total)
    best = (_at_home(allowed, home) if home else None) or _near(allowed, query.draw)
    predicted = holdings.predicted(best)
    moved = not predicted or min(priced, key=_total)[0] < allowed[0][0]
    return Choice(best.name, Reason.OVERFLOW if moved else Reason.WARM, predicted)


def _at_home(allowed: Sequence[_Priced], home: str) -> Candidate | None:
    """The ring's place, if it is not much dearer: there the shared head is computed once, the own text only once anyway."""
    dearest = DEARER * allowed[0][0]
    return next((member for total, member in allowed if member.name == home and total <= dearest), None)


def _near(allowed: Sequence[_Priced], draw: float) -> Candidate:
    """One of those nearly as cheap as the cheapest; by other bits of the draw than `_divert` looks at."""
    tied = bisect_right(allowed, NEAR * allowed[0][0], key=_total)
    return allowed[int(draw * 1024 % 1 * tied)][1]


def _within(priced: Sequence[_Priced], limits: Limits) -> list[_Priced]:
    """Those within the soft bound if they are not much dearer; else those within the hard one."""
    soft, hard = limits.soft - 1, limits.hard - 1
    allowed = [price for price in priced if price[1].inflight <= hard]
    calm = [price for price in allowed if price[1].inflight <= soft]
    if not calm or len(calm) == len(allowed):
        return allowed
    return calm if min(calm, key=_total)[0] <= DEARER * min(allowed, key=_total)[0] else allowed


def _shortlist(query: Query, candidates: Candidates, home: str) -> list[Candidate]:
    """The lightest, the lightest of the deepest holders, and the ring's place."""
    members = candidates.by_weight
    if len(members) <= FEW:
        return members
    wanted = 0
    for _, _, _, held in reversed(query.levels):
        wanted = wanted or held & candidates.mask
        if (held & candidates.mask).bit_count() > FEW:
            break
        wanted |= held
    holders = [member for member in members[FEW:] if member.bit & wanted]
    chosen = members[:FEW] + holders[:FEW]
    if home and all(member.name != home for member in chosen):
        chosen.append(candidates[home])
    return chosen


def _price(query: Query, candidates: Candidates, holdings: Holdings, members: Sequence[Candidate]) -> list[_Priced]:
    """Marginal cost to everybody, seconds: research algorithms.md 6.2."""
    busy, n = kappa(candidates.mean_wait_s, candidates.tau_s), query.prompt_tokens
    priced: list[_Priced] = []
    for member in members:
        rates, trust = member.rates, member.trust
        device, host, held = holdings.of(member.bit)
        if trust < 1.0:
            device, host, held = int(device * trust), int(host * trust), int(held * trust)
        if held > device:
            _, load_s, fill_s = cheapest(Depths(device, host, held), n, rates)
        else:  # spelt out for speed
            load_s, fill_s = 0.0, rates.prefill_s(n - held, held)
        work_s = fill_s + load_s + member.refill_s * (n - device)
        slowed_s = member.share * (fill_s + rates.output_tokens * rates.step_s_per_sequence)
        priced.append((member.weight_s + busy * work_s + slowed_s, member))
    return priced
