"""Everything this router knows of one replica, and what follows from it: is it usable, and how is its cache known.

Three sources speak: the membership, the replica's agent (if it has one), and what happened to connections. None can make a
replica usable against the word of another; `verdict()` weighs them and always says why.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from typing import Final, NamedTuple

from prefixpool import wire
from prefixpool.errors import WireError
from prefixpool.policy.candidates import Candidate
from prefixpool.wire import Mode, State, Tier
from prefixpool_router.cache_mode import cache_mode
from prefixpool_router.knowledge import Knowledge
from prefixpool_router.load import LoadBook
from prefixpool_router.membership import Member, MemberState
from prefixpool_router.pictures import Account, Pictures
from prefixpool_router.reach import Reach
from prefixpool_router.watcher import Watcher

ATTACH_S: Final = 5.0  # an agent that has just come (back) may not have looked at its engine yet
_NEVER: Final = float("-inf")
DEFAULT_BLOCK_TOKENS: Final = 16  # of engines that nobody tells about: only the resolution of comparisons


class Verdict(NamedTuple):
    """What follows from all that is known."""

    usable: bool
    mode: Mode
    why: str  # it is not usable; "" if it is
    mode_why: str  # it is not precise, or warming; "" if it is


class Replica:
    """One member. Receives its agent's stream (`agent_stream.AgentSink`)."""

    def __init__(
        self, member: Member, knowledge: Knowledge, watcher: Watcher, clock: Callable[[], float], *, history_ttl_s: float
    ) -> None:
        self.member = member
        self.candidate = Candidate(member.name)
        self.load = LoadBook()
        self.reach = Reach()
        self.pictures = Pictures(knowledge, history_ttl_s)
        self.created_s = clock()
        # What its agent told. `welcome` is None without a living stream; `status` outlives it.
        self.welcome: wire.Welcome | None = None
        self.status: wire.Status | None = None
        self.costs = wire.Costs()
        self.report: wire.Load | None = None
        self.models: tuple[str, ...] = ()  # () = unknown
        self.template = wire.Template()
        self.block_tokens = DEFAULT_BLOCK_TOKENS
        self.snapshots = 0
        self.losses = 0
        self.predicted: Counter[Tier] = Counter()  # cached tokens expected of its answers, by the tier they were in
        self._watcher = watcher
        self._clock = clock
        self._stream_problem = "agent not reached yet" if member.agent else "no agent"
        self._reported_s = _NEVER
        self._removed = False
        self._alive = False  # somebody saw this engine answer: its agent, or a probe
        self._epoch = 0  # the last one that was told; agents that have not seen their engine yet say 0
        self._attaching_until_s = _NEVER

    @property
    def name(self) -> str:
        return self.member.name

    # -- verdict

    def verdict(self) -> Verdict:
        """What follows from all that is known now."""
        mode, mode_why = self._mode()
        unusable = self._unusable()
        self.reach.note(self._clock(), answers_nobody=self._answers_nobody())
        return Verdict(not unusable, mode, unusable, mode_why)

    @property
    def mode(self) -> Mode:
        """How its cache is known."""
        return self._mode()[0]

    @property
    def max_inflight(self) -> int:
        """Requests that its gate lets in; 0: no bound, or none is known now."""
        return self.welcome.max_inflight if self.welcome is not None else 0

    @property
    def has_host_memory(self) -> bool:
        """As a tier below its device, says its agent."""
        return self.welcome is not None and self.welcome.host_bytes > 0

    @property
    def settled(self) -> bool:
        """Whether a starting router need not wait for this replica: it has its picture, or is not going to have one soon."""
        if self.member.agent is None or self.member.state is not MemberState.READY:
            return True
        if self.welcome is None or self.status is None:
            return self._alive or self.reach.refuses_key
        expected = self.status.state is State.READY and self.status.mode is Mode.PRECISE
        return not expected or self.pictures.account is Account.WHOLE

    @property
    def needs_probe(self) -> bool:
        """Whether only a probe can tell how its engine is: it is down, or no agent speaks for it."""
        return bool(self.reach.down) or self.welcome is None or self._attaching

    @property
    def was_told(self) -> bool:
        """Whether its agent ever told a state."""
        return self.status is not None

    def _unusable(self) -> str:
        if self._removed or self.member.state is MemberState.TERMINATING:
            return "terminating"
        if self.member.state is MemberState.NOT_READY:
            return "not ready, says the membership"
        if problem := self.reach.problem(self._clock()):
            return problem
        if self.welcome is None or self.status is None:
            problem = self._stream_problem if self.welcome is None else "its agent has not told its state yet"
            return "" if self._alive else f"not seen answering yet; {problem}"
        if self.status.state is State.READY or (self._attaching and self._alive):
            return ""
        return f"engine is {self.status.state}" + (f": {self.status.reason}" if self.status.reason else "")

    @property
    def out_of_reach(self) -> bool:
        """Its engine has answered nobody for some time: what is silent there will not go on."""
        return self.reach.lost(self._clock())

    def _answers_nobody(self) -> bool:
        """Its engine answers nobody. One that is fenced, or that the membership takes out, still works for those it has."""
        if self.reach.down:
            return True
        told = self.status if self.welcome is not None and not self._attaching else None
        return told is not None and told.state not in (State.READY, State.FENCED)

    def _mode(self) -> tuple[Mode, str]:
        return cache_mode(self.welcome, self.status, self.pictures, self._stream_problem)

    # -- membership

    def joined(self, member: Member) -> None:
        """The same replica, perhaps in another state."""
        self.member = member
        self._watcher.judge(self)

    def left(self) -> None:
        """For good: whatever still arrives for it changes nothing."""
        self._removed = True
        self.pictures.retire()

    # -- the agent's stream

    def welcomed(self, welcome: wire.Welcome) -> None:
        """Raises WireError: another replica answers at this address (addresses are reused, identities are not)."""
        if welcome.replica != self.name:
            raise WireError(f"this is the agent of {welcome.replica!r}")
        if self._epoch_is(welcome.epoch):  # else what was told last still holds: an agent that restarts costs no request
            self.status, self._alive = None, False
        self._attaching_until_s = self._clock() + ATTACH_S if self._alive else _NEVER
        self.welcome = welcome
        self.models, self.template = welcome.models, welcome.template
        self.block_tokens = welcome.block_tokens or DEFAULT_BLOCK_TOKENS
        self._watcher.judge(self)

    def snapshot_begins(self, begin: wire.SnapshotBegin) -> None:
        """Forget this replica's residency: a whole new picture follows."""
        if begin.epoch and not self._removed:  # 0: an agent that has not seen its engine yet knows nothing of its cache
            self.pictures.begin()
            self.snapshots += 1
            self._watcher.snapshot_begun(self)
            self._watcher.judge(self)

    def snapshot_ended(self, end: wire.SnapshotEnd) -> None:
        """The picture is complete."""
        if self.pictures.end():
            self._watcher.judge(self)

    def published(self, tier: Tier, hashes: array[int], depths: array[int]) -> None:
        """Resident now."""
        self.pictures.publish(hashes, depths, tier)

    def retracted(self, tier: Tier, hashes: array[int]) -> None:
        """Gone now."""
        self.pictures.retract(hashes, tier)

    def load_reported(self, load: wire.Load) -> None:
        """Also the heartbeat."""
        self.report = load
        self._reported_s = self._clock()
        self.load.reported(load, self._reported_s)
        self._watcher.weigh(self)

    def costs_measured(self, costs: wire.Costs) -> None:
        """Kept until better ones come."""
        self.costs = costs
        self._watcher.judge(self)

    def status_changed(self, status: wire.Status) -> None:
        """State of the engine. A ready engine of a new epoch ends any earlier verdict of being down."""
        changed = self._epoch_is(status.epoch)
        if self.status is None or status.store != self.status.store:
            self.pictures.mount(status.store)
        self.status = status
        if status.state is not State.STARTING or changed:
            self._attaching_until_s = _NEVER  # it has looked
        self._alive = status.state is State.READY or (self._alive and self._attaching)
        self.reach.told(status.epoch, ready=status.state is State.READY)
        self._watcher.judge(self)

    def lost(self, why: str) -> None:
        """The stream is gone. What it told last stays in use as history, for a while."""
        self._stream_problem = why
        if self.welcome is not None:
            self.losses += 1
            self._watcher.stream_lost(self)
            told = self.status.state if self.status is not None else State.READY
            self._alive = self._alive and (told is State.READY or self._attaching)
            self.welcome = self.report = None
            self.load.report_expired()
            self.pictures.agent_lost(self._clock())
        self._watcher.judge(self)

    def _epoch_is(self, epoch: int) -> bool:
        """True if that is another engine than the one told of last."""
        if not epoch:
            return False
        changed, self._epoch = epoch != self._epoch != 0, epoch
        if changed:
            self.pictures.new_epoch()
        return changed

    @property
    def _attaching(self) -> bool:
        """Whether its agent may not know its engine yet: what was seen before counts more than that it is `starting`."""
        return self._clock() < self._attaching_until_s

    # -- connections and probes

    def went_down(self, why: str) -> None:
        """A connection was refused or reset, or a probe failed: nothing more is sent there, and its affinity is gone."""
        self.reach.went_down(why, self._epoch)
        self.pictures.engine_down()
        self._watcher.judge(self)

    def came_up(self) -> None:
        """A probe was answered."""
        self.reach.came_up()
        self._alive = True
        self._watcher.judge(self)

    def refused_key(self) -> None:
        """A probe with the key of this router was answered with 401."""
        self.reach.refused_key()
        self._watcher.judge(self)

    def was_fenced(self) -> None:
        """It refused a request as one on its way out does. Agents tell this too; this is for before, or their absence."""
        self.reach.was_fenced(self._clock())
        self._watcher.judge(self)

    def was_full(self) -> None:
        """Its gate has as many requests as it takes. Without an agent nobody would tell when that is over."""
        if self.max_inflight:
            self.load.full(self.max_inflight)
            self._watcher.weigh(self)

    # -- time

    def tick(self, now: float) -> None:
        """Let what is too old lapse. Called a few times a second."""
        lapsed = self.reach.lapse(now)
        lapsed = self.pictures.expire(now) or lapsed
        if self.report is not None and now - self._reported_s > wire.STALE_AFTER_S:
            self.report = None
            self.load.report_expired()
            lapsed = True
        if self._attaching_until_s <= now:
            lapsed = lapsed or self._attaching_until_s > _NEVER
            self._attaching_until_s = _NEVER
            self._alive = self._alive and (self.status is None or self.status.state is State.READY)
        if lapsed:
            self._watcher.judge(self)
