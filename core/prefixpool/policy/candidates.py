"""The replicas that a request may go to, with everything policies derive from their loads and costs.

Derived numbers are kept where loads change (a few hundred times a second), not computed per decision.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from operator import attrgetter
from statistics import median_high
from typing import Any, Final, TypeAlias

from prefixpool.policy import cost
from prefixpool.ring import Ring
from prefixpool.wire import Costs

UNKNOWN: Final = -1

SETTLED: Final = 0.75  # a newcomer is one until it holds this part of what the others do
FULL: Final = 0.9  # a replica whose cache is fuller than this is no newcomer, however little it holds

Numbers: TypeAlias = tuple[Any, ...]  # all of a `Candidate`, as they were at some time

_weight = attrgetter("weight_s")


class Candidate:
    """One replica. Its owner creates it and changes it through `Candidates` only; policies read it.

    Slotted and shared on purpose: 64 of them are read per decision.
    """

    __slots__ = (
        "bit",
        "costs",
        "device_tokens",
        "free_tokens",
        "fresh",
        "inflight",
        "name",
        "pending_tokens",
        "rates",
        "refill_s",
        "resident",
        "share",
        "trust",
        "wait_s",
        "weight_s",
    )

    def __init__(self, name: str, *, bit: int = 0, device_tokens: int = 0) -> None:
        self.name = name
        self.bit = bit  # 1 << 3 * index column; 0: holds nothing that we know of
        self.device_tokens = device_tokens  # capacity of the device tier; 0 = unknown
        self.inflight = 0  # all routers together: the agent's count plus own dispatches it has not reported yet
        self.pending_tokens = 0  # uncached prompt tokens dispatched and not yet prefilled
        self.free_tokens = UNKNOWN  # device tokens neither in use nor cached
        self.resident = 0  # boundaries it is known to hold, for finding newcomers
        self.costs = Costs()  # as measured; zeros are filled in, see `rates`
        self.trust = 1.0  # 0..1: how far predictions for this replica are believed (closed loop)
        # Derived by `Candidates`:
        self.rates = cost.DEFAULT_RATES  # `costs` with what is not measured filled in
        self.wait_s = 0.0  # until its queued prefill is done
        self.weight_s = 0.0  # what any request costs there, whatever it brings: wait and own decoding
        self.share = 0.0  # weighted decodes that a prefill there slows down
        self.refill_s = 0.0  # per token taken from its cache
        self.fresh = True  # new or emptied, and holds much less than the others

    @classmethod
    def of(cls, numbers: Numbers) -> Candidate:
        """One that has these numbers."""
        candidate = cls.__new__(cls)
        for field, value in zip(cls.__slots__, numbers, strict=True):
            setattr(candidate, field, value)
        return candidate

    @property
    def fullness(self) -> float:
        """Of the device tier, 0..1; 1 where it is not known."""
        if self.free_tokens == UNKNOWN or not self.device_tokens:
            return 1.0
        return min(1.0, max(0.0, 1.0 - self.free_tokens / self.device_tokens))


_numbers: Final = attrgetter(*Candidate.__slots__)


class Candidates:
    """Never shared between threads. Iterates over all members, the lightest first."""

    tau_s: float  # prefill of a typical request: what a wait is compared with
    loads: dict[str, int]  # requests in flight by name
    mask: int  # bits of all members
    total_inflight: int
    total_wait_s: float
    _order: list[Candidate]
    _order_due: bool
    _ring: Ring | None
    _newcomers: list[Candidate]
    _newcomers_due: bool
    _taken: dict[str, Numbers]  # since a member changed last

    def __init__(self, members: Iterable[Candidate] = ()) -> None:
        self._members = {member.name: member for member in members}
        self._taken = {}
        self._rebuild()
        for member in self._order:
            self._derive(member)

    # -- members

    def add(self, candidate: Candidate) -> None:
        """A new member, or another under the same name."""
        self._members[candidate.name] = candidate
        self._rebuild()
        self._derive(candidate)

    def remove(self, name: str) -> None:
        """Unknown names are ignored."""
        if self._members.pop(name, None):
            self._taken.pop(name, None)
            self._rebuild()

    def without(self, names: Collection[str]) -> Candidates:
        """The same but for some members, for one decision; shares members and ring, so don't update it."""
        rest = Candidates.__new__(Candidates)
        rest._members = {name: member for name, member in self._members.items() if name not in names}
        rest._ring, rest.tau_s, rest._taken = self.ring, self.tau_s, self._taken
        rest._sum_up()
        rest._newcomers = [member for member in self.newcomers if member.name not in names]
        rest._newcomers_due = False
        return rest

    def get(self, name: str) -> Candidate | None:
        """The member of that name."""
        return self._members.get(name)

    def __getitem__(self, name: str) -> Candidate:
        return self._members[name]

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self.by_weight)

    # -- numbers

    def update(
        self,
        name: str,
        *,
        inflight: int | None = None,
        pending_tokens: int | None = None,
        free_tokens: int | None = None,
        resident: int | None = None,
        trust: float | None = None,
    ) -> None:
        """Set what changed; about a microsecond. Raises KeyError for unknown names.

        `resident`: `PrefixIndex.count`, or `Predicted.count` for a replica without events; losing half at once makes it a
        newcomer.
        """
        member = self._members[name]
        if inflight is not None:
            self.total_inflight += inflight - member.inflight
            member.inflight = self.loads[name] = inflight
        if pending_tokens is not None:
            member.pending_tokens = pending_tokens
        if free_tokens is not None:
            member.free_tokens = free_tokens
        if trust is not None:
            member.trust = trust
        if resident is not None:
            member.fresh = member.fresh or 2 * resident < member.resident
            member.resident = resident
            self._newcomers_due = self._newcomers_due or member.fresh
        self._derive(member)

    def set_costs(self, name: str, costs: Costs) -> None:
        """What the agent measured; zeros are filled in. Raises KeyError for unknown names."""
        member = self._members[name]
        if member.costs != costs:
            member.costs = costs
            self._fill_in()
            self._derive(member)

    def set_place(self, name: str, *, bit: int, device_tokens: int) -> None:
        """Its index column (another one after each restart) and its capacity. Raises KeyError for unknown names."""
        member = self._members[name]
        self.mask += bit - member.bit
        member.bit, member.device_tokens = bit, device_tokens
        self._newcomers_due = self._newcomers_due or member.fresh
        self._derive(member)

    # -- what policies read

    @property
    def ring(self) -> Ring:
        """Over all members; built when first asked for after a change of membership."""
        if self._ring is None:
            self._ring = Ring(self._members)
        return self._ring

    @property
    def mean_inflight(self) -> float:
        return self.total_inflight / len(self._members)

    @property
    def mean_wait_s(self) -> float:
        return max(0.0, self.total_wait_s / len(self._members))

    @property
    def by_weight(self) -> list[Candidate]:
        """All members, the lightest first. Sorted again only after an update, and then it is nearly sorted already."""
        if self._order_due:
            self._order.sort(key=_weight)
            self._order_due = False
        return self._order

    @property
    def newcomers(self) -> list[Candidate]:
        """Members that joined or lost their cache and do not hold much yet. A pool that starts as a whole has none."""
        if self._newcomers_due:
            self._settle()
            self._newcomers_due = False
        return self._newcomers

    def numbers(self) -> list[Numbers]:
        """All members as they are now, the lightest first. Those that did not change since are the same objects again."""
        taken = self._taken
        return [taken.get(member.name) or self._take(member) for member in self.by_weight]

    def _take(self, member: Candidate) -> Numbers:
        numbers = self._taken[member.name] = _numbers(member)
        return numbers

    # -- upkeep

    def _rebuild(self) -> None:
        self._ring = None
        self._sum_up()
        self._fill_in()

    def _sum_up(self) -> None:
        self._order, self._order_due = list(self._members.values()), True
        self._newcomers, self._newcomers_due = [], True
        self.loads = {member.name: member.inflight for member in self._order}
        self.mask = sum(member.bit for member in self._order)
        self.total_inflight = sum(self.loads.values())
        self.total_wait_s = sum(member.wait_s for member in self._order)

    def _fill_in(self) -> None:
        pool = cost.pool_rates([member.costs for member in self._order])
        self.tau_s = pool.prefill_s(cost.TYPICAL_UNCACHED_TOKENS, 0)
        for member in self._order:
            rates = cost.rates(member.costs, pool)
            if rates != member.rates:
                member.rates = rates
                self._derive(member)

    def _derive(self, member: Candidate) -> None:
        self._taken.pop(member.name, None)
        rates, batch = member.rates, member.inflight
        wait_s = rates.prefill_s(member.pending_tokens, 0) + rates.step_s if member.pending_tokens else 0.0
        self.total_wait_s += wait_s - member.wait_s
        member.wait_s = wait_s
        member.weight_s = wait_s + cost.DECODE_WEIGHT * rates.output_tokens * (
            rates.step_s + batch * rates.step_s_per_sequence
        )
        member.share = cost.DECODE_WEIGHT * batch
        member.refill_s = cost.REUSE * member.fullness * min(rates.p1, member.costs.load_s_per_token or rates.p1)
        self._order_due = True

    def _settle(self) -> None:
        fresh = [member for member in self._order if member.fresh]
        settled = [member.resident for member in self._order if not member.fresh]
        bar = SETTLED * median_high(settled) if settled else 0.0
        for member in fresh:
            full = member.free_tokens != UNKNOWN and member.fullness > FULL
            member.fresh = member.resident < bar and not full
            self._taken.pop(member.name, None)
        self._newcomers = [member for member in fresh if member.fresh and member.bit]
