"""The join: the engine's KV events and the gate's notes become boundaries with tiers and token depths.

Events say which blocks exist, as token ids; notes say which texts were asked for. A session (one request) joins its note
with the blocks that carry its id, whichever comes first; along the path from the root, reused blocks included, its
boundaries are placed. Rules that bind are in research/residency.md; each has a test of its name.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from prefixpool.chain import Canonical, PrefixChain, canonical, prefix_chain
from prefixpool.comparable import comparable
from prefixpool.note import Arrival, End
from prefixpool.wire import Template, Tier
from prefixpool_agent.residency import saved
from prefixpool_agent.residency.answer import parse_answer
from prefixpool_agent.residency.block import UNPLACED
from prefixpool_agent.residency.blocks import BlockTrie
from prefixpool_agent.residency.boundaries import BoundaryMap, Changes
from prefixpool_agent.residency.kv_event import Cleared, Removed, Stored, parse_event
from prefixpool_agent.residency.limits import Limits
from prefixpool_agent.residency.placing import Placer
from prefixpool_agent.residency.remembered import Facts
from prefixpool_agent.residency.sessions import Session, Sessions
from prefixpool_agent.residency.table import TokenTable

_DEFAULT: Final = Limits()
_DEFECTS: Final = 16


class Finished(NamedTuple):
    """One request, over. Counts are None where the answer did not tell them."""

    id: str
    path: str  # "" if its arrival is unknown
    status: int
    first_s: float
    at_s: float
    prompt_tokens: int | None
    cached_tokens: int | None  # actual
    predicted_tokens: int | None  # at arrival, whole blocks; None: no chain, or its arrival is unknown
    output_tokens: int | None
    uncached: int | None  # prompt tokens that were computed
    comparable: bool  # False: the engine's own count means something else, see prefixpool.comparable
    full: bool  # the engine re-announced what it reused


class Residency:
    """Not thread-safe; no clock, no I/O. Order: feed events, notes, resets; then `flush()` when the sockets are drained."""

    def __init__(self, table: TokenTable, block_tokens: int, *, template: Template, limits: Limits = _DEFAULT) -> None:
        self.counts: Counter[str] = Counter()  # everything ignored or dropped, by reason
        self._block_tokens = block_tokens
        self._template = template
        self.kind = saved.Kind(block_tokens, template.digest)
        self._boundaries = BoundaryMap(block_tokens, limits, self.counts)
        self._trie = BlockTrie(block_tokens, limits.blocks, self._boundaries, self.counts)
        self._sessions = Sessions(limits, self.counts)
        self._placer = Placer(table, block_tokens, template, self._boundaries, self.counts)
        self._dirty: dict[str, None] = {}
        self.defects: deque[Exception] = deque(maxlen=_DEFECTS)  # each ended one request's placing; whoever flushes tells
        self.lives = 0  # pictures begun: whatever was told of blocks before belongs to another
        self._group: int | None = None  # KV group that is followed: the first one with full attention

    @property
    def boundaries(self) -> int:
        """Boundaries known, resident or not."""
        return len(self._boundaries)

    @property
    def blocks(self) -> int:
        """Blocks known, resident or not."""
        return len(self._trie)

    @property
    def sessions(self) -> int:
        """Requests not finished with."""
        return len(self._sessions)

    @property
    def device_blocks(self) -> int:
        """Blocks with a copy on the device."""
        return self._trie.on_device

    def resident_blocks(self) -> Counter[Tier]:
        """Blocks that a request could reuse now, by the tier that serves them; walks all of them."""
        return self._trie.resident()

    # -- the engine's events ------------------------------------------------------------------------------------------

    def event(self, event: Mapping[str, Any]) -> None:
        """One KV event as decoded from the engine. Odd ones are counted and change nothing."""
        parsed = parse_event(event)
        match parsed:
            case str():
                self.counts[parsed] += 1
            case Cleared():
                self.cleared(external=False)
            case Removed():
                if parsed.group in (None, self._group):
                    self._trie.removed(parsed.hashes, parsed.tier)
            case Stored():
                if self._group is None:
                    self._group = parsed.group
                if parsed.group in (None, self._group):
                    self._stored(parsed)

    def _stored(self, event: Stored) -> None:
        last, again = self._trie.stored(event)
        if event.tier is Tier.DISK:  # what was told of a text went with its chunk, if it ever lay there
            self._boundaries.news.add(event.hashes)
        session = self._sessions.open(event.session) if event.session else None
        repeats = self._sessions.repeats(event.session) if event.session else False
        if repeats is False:
            self._trie.add_copies(again)  # two requests computed the same at once
        elif repeats is None and session:
            self._trie.suspect(again)
            session.again += again
        if session and last:
            session.last = last
            self._dirty[session.id] = None
            self.counts["event_before_arrival"] += not session.arrived

    def cleared(self, external: bool) -> None:
        """The prefix cache was reset. The engine's own event comes with its next step only, so the gate tells it, too."""
        self.counts["cleared"] += 1
        for session in self._sessions:
            session.again.clear()
        self._trie.cleared(external)

    def on_disk(self, found: Iterable[tuple[int, int | None]], gone: Sequence[int]) -> None:
        """What was read from the disk itself: (block, the one before it), parents first, and blocks that are gone."""
        for block, parent in found:
            self._trie.on_disk(block, parent)
        self._trie.removed(gone, Tier.DISK)

    def share_disk(self, shared: bool) -> None:
        """Whether other replicas read the same disk: then it is told of apart from what is nearer, see boundaries.py."""
        self._boundaries.share_disk(shared)

    def reset(self) -> None:
        """A new epoch, or events were lost: nothing known of blocks may be believed. Facts about texts stay true."""
        self.lives += 1
        self._boundaries.reset()
        self._trie.reset()
        self._group = None
        self._dirty.clear()
        for session in self._sessions:
            session.last, session.mapped_blocks, session.next_blocks = None, 0, 0.0
            session.again.clear()

    # -- the gate's notes ---------------------------------------------------------------------------------------------

    def arrival(self, note: Arrival, day: str) -> None:
        """A request passed the gate; its prediction is fixed now. `day`: ISO date (UTC) of its arrival."""
        session = self._sessions.open(note.id)
        if session is None or session.arrived:
            return  # sent again from the gate's ring
        session.arrived, session.path, session.full = True, note.path, note.full
        self._trie.settle(session.again, real=not session.full)
        session.again = []
        body = _object(note.body)
        if body is None:
            self.counts["arrival_without_body"] += 1
            return
        session.comparable = comparable(body)
        salt = body.get("cache_salt")
        request = canonical(note.path, body, template=self._template, salt=salt if isinstance(salt, str) else "", day=day)
        if request is not None:
            self._note(session, request, prefix_chain(request))

    def _note(self, session: Session, request: Canonical, chain: PrefixChain) -> None:
        session.predicted = self._boundaries.lookup(chain.hashes)[0]
        self._sessions.note(session, request, chain)
        if session.last is not None:
            self._dirty[session.id] = None

    def predicted(self, id_: str) -> int:
        """Cached tokens expected when the request arrived; 0 once it is finished with, or if nothing is known of it."""
        session = self._sessions.get(id_)
        return (session.predicted or 0) if session else 0

    def end(self, note: End) -> Finished | None:
        """The answer is over. None if this end was told before."""
        session = self._sessions.open(note.id)
        if session is None or session.answer is not None:
            return None
        session.answer = answer = parse_answer(note.body)
        self.counts["end_before_arrival"] += not session.arrived
        finished = _finished(session, note, self._block_tokens)
        if session.request is None:
            self._sessions.finish(session)
            return finished
        if session.last is None and answer.prompt_tokens is not None:
            session.last = self._placer.reused_path(session)
            self.counts["stored_nothing"] += 1
        self._dirty[session.id] = None
        return finished

    # -- what follows -------------------------------------------------------------------------------------------------

    def flush(self) -> Changes:
        """Place the boundaries of all requests that have news, then tell what changed since the last flush."""
        dirty, self._dirty = self._dirty, {}
        for id_ in dirty:
            session = self._sessions.get(id_)
            if session and session.request and session.chain:
                self._map_or_drop(session, session.request, session.chain)
        return self._boundaries.take_changes()

    def _map_or_drop(self, session: Session, request: Canonical, chain: PrefixChain) -> None:
        try:
            self._map(session, request, chain)
        except Exception as error:  # noqa: BLE001  one text's bug must not cost all others, and it would meet every new agent
            self.counts["placing_broke"] += 1
            self.defects.append(error)
            self._dirty.pop(session.id, None)
            self._sessions.finish(session)

    def _map(self, session: Session, request: Canonical, chain: PrefixChain) -> None:
        block = session.last
        while block is not None and not self._trie.alive(block):
            block = block.parent  # evicted meanwhile: what is left of its path
        if block is not None and block.blocks == UNPLACED:
            self._dirty[session.id] = None  # a parent's event is missing, perhaps for ever
            self.counts["path_unknown"] += 1
        elif block is not None and block.blocks > 0 and any(not each.tokens for each in block.path()):
            self.counts["tokens_unknown"] += 1  # read from the disk before; the engine has not said what they are
        elif block is not None and block.blocks > 0:
            self._placer.place(session, request, chain, block.path())
        if session.answer is None:
            return
        if session.mapped_blocks >= self._placer.final_blocks(session):
            self._sessions.finish(session)
        else:
            self._sessions.late(session)

    def snapshot(self) -> Iterator[tuple[Tier, list[int], list[int]]]:
        """All resident boundaries as of the last flush: (tier, hashes, token depths), in batches."""
        return self._boundaries.snapshot()

    def save(self) -> bytes:
        """What is known of texts, for `restore()` after the agent's own death. No text, no token ids."""
        return saved.dump(self.kind, self._boundaries.all_facts())

    def take_news(self) -> list[tuple[int, Facts]]:
        """(block, facts) of what was learned here since the last call, and of what this engine has written to disk since."""
        return self._boundaries.take_news(self._trie.placed)

    def restore(self, data: bytes, *, own: bool = False) -> int:
        """Take over saved facts; each is used once its block is announced. Returns the number of boundaries, 0 if unfit.

        `own`: they were this replica's, who perhaps told nobody else.
        """
        facts = saved.load(data, self.kind)
        if facts is None:
            self.counts["restore_refused"] += 1
            return 0
        self._boundaries.restore(facts, news=own)
        for hash_, _ in facts:
            if (block := self._trie.placed(hash_)) is not None:
                self._boundaries.placed(block)
        return sum(len(pairs) // 2 for _, pairs in facts)


def _object(body: bytes) -> dict[str, Any] | None:
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # cut, or nonsense that the engine refuses
        return None
    return decoded if isinstance(decoded, dict) else None


def _finished(session: Session, note: End, block_tokens: int) -> Finished:
    answer = session.answer or parse_answer(b"")
    prompt, cached, predicted = answer.prompt_tokens, answer.cached_tokens, session.predicted
    if prompt and predicted is not None:
        predicted = min(predicted, (prompt - 1) // block_tokens * block_tokens)  # the last token is always computed
    return Finished(
        id=note.id,
        path=session.path,
        status=note.status,
        first_s=note.first_s,
        at_s=note.at_s,
        prompt_tokens=prompt,
        cached_tokens=cached,
        predicted_tokens=predicted,
        output_tokens=answer.output_tokens,
        uncached=None if prompt is None or cached is None else max(0, prompt - cached),
        comparable=session.comparable and note.status == 200 and cached is not None and predicted is not None,
        full=session.full,
    )
