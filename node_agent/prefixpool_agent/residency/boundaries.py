"""Which boundary hangs on which block, and what changed since routers were last told. Pure.

A boundary hangs on the deepest block that lies wholly inside its token depth and is published for that block's level.
Boundaries less than one block deep (role markers at the start) live and die with the first block: they say "something of
this prompt is here", and routers count less than a block as nothing anyway.

If the disk is one that others have, too, it is told of by itself, for them: boundaries are published for `disk` if their
block is stored, whatever its level; what lies on disk behind a block that does not is not published.

Which boundaries belong to a block is a fact about text, not about a cache: block hashes are chained over all tokens before.
So facts outlive their blocks for a while (bounded), and come back when the engine announces the same block again: after
the agent's restart by replay, after a gap, after a new engine start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from prefixpool.wire import Tier
from prefixpool_agent.residency.block import Block
from prefixpool_agent.residency.limits import Limits
from prefixpool_agent.residency.news import News
from prefixpool_agent.residency.remembered import Facts, Remembered

SNAPSHOT_ROWS: Final = 4096  # boundaries per batch of a snapshot
MOST_ON_BLOCK: Final = 512  # boundaries: text that the template does not print has marks, but no tokens
_PUBLISHED: Final = (Tier.DEVICE, Tier.HOST, Tier.DISK)
_BITS: Final = {Tier.ABSENT: 0, Tier.DEVICE: 1, Tier.HOST: 2, Tier.DISK: 4}
_TIER_BITS: Final = 3
_ANY: Final = (1 << _TIER_BITS) - 1
_GONE: Final = 0  # state: depth << 3 | bits of the tiers that it is published for; none whatever the depth


class Changes(NamedTuple):
    """Since the last flush. No (tier, hash) is in both; apply `publish` first, so that moves between tiers leave no gap."""

    publish: dict[Tier, list[tuple[int, int]]]  # (hash, token depth)
    retract: dict[Tier, list[int]]

    def __bool__(self) -> bool:
        return bool(self.publish or self.retract)


class BoundaryMap:
    """Boundary hash -> block, with token depths kept at the block."""

    def __init__(self, block_tokens: int, limits: Limits, counts: Counter[str]) -> None:
        self._size = block_tokens
        self._limits = limits
        self._counts = counts
        self._where: dict[int, Block] = {}
        self._told: dict[int, int] = {}  # boundaries touched since the last flush -> their state at that flush
        self._owed: dict[int, int] = {}  # published before a reset, not retracted yet: bits of tiers
        self._shared = False  # others have the same disk
        self._remembered = Remembered(limits, counts)
        self.news = News()

    def __len__(self) -> int:
        return len(self._where)

    # -- what the trie reports ----------------------------------------------------------------------------------------

    def changing(self, block: Block) -> None:
        """See blocks.Watcher."""
        for key in (block.facts or ())[::2]:
            self._touch(key)

    def placed(self, block: Block) -> None:
        """See blocks.Watcher: what was known of this block's text is usable again."""
        facts = self._remembered.take(block.hash)
        for key, depth in zip(facts[::2], facts[1::2], strict=True):
            if key not in self._where:
                self._hang(key, depth, block)

    def dropped(self, block: Block) -> None:
        """See blocks.Watcher."""
        if not block.facts:
            return
        facts = self._flat(block)
        for key in facts[::2]:
            self._touch(key)
            del self._where[key]
        block.facts = None
        self._remembered.keep(block.hash, facts)

    # -- facts --------------------------------------------------------------------------------------------------------

    def facts(self, block: Block) -> Iterator[tuple[int, int]]:
        """(boundary, token depth) of all that hang on a block."""
        base = (block.blocks - 1) * self._size
        flat = block.facts or ()
        return ((flat[i], base + flat[i + 1]) for i in range(0, len(flat), 2))

    def depth(self, key: int) -> int:
        """Token depth of a known boundary."""
        block = self._where[key]
        flat = block.facts or []
        for i in range(0, len(flat), 2):
            if flat[i] == key:
                return (block.blocks - 1) * self._size + flat[i + 1]
        raise KeyError(key)

    def block_of(self, key: int) -> Block | None:
        """Where a boundary hangs, resident or not."""
        return self._where.get(key)

    def attach(self, key: int, depth: int, path: Sequence[Block], *, certain: bool = True) -> None:
        """Hang a boundary on a path. `certain=False`: a guess (a reply's boundary), which yields to what is known.

        Two requests with the same text have the same tokens, so the deeper of two depths on one path is the truth (the other
        request's path was shorter). Off the path, the engine tokenised a reply otherwise than it had generated it: then
        the prompt is right.
        """
        block = path[min(max(depth // self._size, 1), len(path)) - 1]
        depth = min(depth, (block.blocks + 1) * self._size - 1)
        old = self._where.get(key)
        if old is not None:
            same_path = old.blocks > len(path) or path[old.blocks - 1] is old
            if (same_path or not certain) and self.depth(key) >= depth:
                return
            if not same_path and not certain and old.level is not Tier.ABSENT:
                return
            self._unhang(key, old)
        self._hang(key, depth, block)
        self.news.add([block.hash])

    def make_room(self, wanted: int) -> None:
        """Before so many boundaries of one path are attached: drop absent ones, then the farthest tier, the deepest first.

        Never a shallow one before a deeper one on its path: routers read a missing boundary as the end of the prefix.
        """
        over = len(self._where) + wanted - self._limits.boundaries
        if over <= 0:
            return
        over += self._limits.boundaries // 16  # so that the next request need not look again
        for tier in (Tier.ABSENT, Tier.DISK, Tier.HOST, Tier.DEVICE):
            over -= self._drop_deepest(tier, over)
            if over <= 0:
                return

    def all_facts(self) -> Iterator[tuple[int, Facts]]:
        """(block hash, facts) of everything known or remembered, oldest first."""
        yield from self._remembered.items()
        for block in self._blocks():
            yield block.hash, self._flat(block)

    def restore(self, facts: Iterable[tuple[int, Facts]], *, news: bool) -> None:
        """Take over what `all_facts` once gave. `news`: others may not know."""
        for block_hash, pairs in facts:
            self._remembered.keep(block_hash, pairs, for_replay=True)
            if news:
                self.news.add([block_hash])

    def take_news(self, block_of: Callable[[int], Block | None]) -> list[tuple[int, Facts]]:
        """(block, facts) of these, since the last call. `block_of`: by hash, of blocks whose path is known."""
        blocks = ((hash_, block_of(hash_)) for hash_ in self.news.take())
        rows = ((hash_, self._flat(block) if block else self._remembered.of(hash_)) for hash_, block in blocks)
        return [(hash_, facts) for hash_, facts in rows if facts]

    # -- what routers see ---------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[int]) -> tuple[int, Block | None]:
        """Whole blocks, in tokens, up to the deepest boundary that is resident in any tier, and the block it hangs on."""
        where, absent, best = self._where, Tier.ABSENT, None
        for key in keys:
            block = where.get(key)
            if block and block.level is not absent and (best is None or block.blocks > best.blocks):
                best = block
        if best is None:
            return 0, None
        if best.blocks > 1:
            return best.blocks * self._size, best
        deep = any(self.depth(key) >= self._size for key in keys if where.get(key) is best)
        return (self._size if deep else 0), best

    def reset(self) -> None:
        """All blocks are gone. Snapshots are empty at once; who follows by changes is owed retractions."""
        for key in self._where:
            self._touch(key)
        self._owed |= {key: state & _ANY for key, state in self._told.items() if state != _GONE}
        self._told.clear()
        for block in self._blocks():
            self._remembered.keep(block.hash, self._flat(block), for_replay=True)
            block.facts = None
        self._where.clear()

    def share_disk(self, shared: bool) -> None:
        """Whether others have the same disk."""
        if shared != self._shared:
            for key in self._where:
                self._touch(key)
            self._shared = shared

    def take_changes(self) -> Changes:
        """What changed since the last call, net."""
        changes = Changes({}, {})
        for key, before in self._told.items():
            now = self._state(key)
            if now != before:
                _record(changes, key, before, now)
        for key, old in self._owed.items():
            for tier in _tiers(old & ~self._state(key)):
                changes.retract.setdefault(tier, []).append(key)
        self._told.clear()
        self._owed.clear()
        return changes

    def snapshot(self) -> Iterator[tuple[Tier, list[int], list[int]]]:
        """Everything as of the last `take_changes()`, so that snapshot and later changes fit together. Made at once."""
        rows: dict[Tier, tuple[list[int], list[int]]] = {tier: ([], []) for tier in _PUBLISHED}
        for block in self._blocks():
            facts = [(key, depth) for key, depth in self.facts(block) if key not in self._told]
            for tier in _tiers(self._published(block)):
                rows[tier][0].extend(key for key, _ in facts)
                rows[tier][1].extend(depth for _, depth in facts)
        for key, state in self._told.items():
            for tier in _tiers(state):
                rows[tier][0].append(key)
                rows[tier][1].append(state >> _TIER_BITS)
        return _batches([(tier, *rows[tier]) for tier in _PUBLISHED])

    # -- inside -------------------------------------------------------------------------------------------------------

    def _blocks(self) -> list[Block]:
        """Those that boundaries hang on, each once."""
        return list({id(block): block for block in self._where.values()}.values())

    def _flat(self, block: Block) -> list[int]:
        return [x for pair in self.facts(block) for x in pair]

    def _state(self, key: int) -> int:
        block = self._where.get(key)
        published = self._published(block) if block is not None else 0
        return self.depth(key) << _TIER_BITS | published if published else _GONE

    def _published(self, block: Block) -> int:
        """Bits of the tiers for which a block's boundaries are."""
        bits = _BITS[block.level]
        if not self._shared:
            return bits
        return (bits & ~_BITS[Tier.DISK]) | (_BITS[Tier.DISK] if block.stored else 0)

    def _touch(self, key: int) -> None:
        if key not in self._told:
            self._told[key] = self._state(key)

    def _hang(self, key: int, depth: int, block: Block) -> None:
        if len(self._where) >= self._limits.boundaries:
            self._counts["boundaries_refused"] += 1
            return
        if len(block.facts or ()) >= 2 * MOST_ON_BLOCK:
            self._drop_older_half(block)
        self._touch(key)
        self._where[key] = block
        # The depth as a difference: small integers cost no memory.
        pair = (key, depth - (block.blocks - 1) * self._size)
        block.facts = [*(block.facts or ()), *pair]

    def _drop_older_half(self, block: Block) -> None:
        """By halves, and not down to the last one: chains of yesterday yield to those of today, in linear time."""
        flat = block.facts or []
        for key in flat[:MOST_ON_BLOCK:2]:
            self._touch(key)
            del self._where[key]
        block.facts = flat[MOST_ON_BLOCK:]
        self._counts["boundaries_dropped"] += MOST_ON_BLOCK // 2

    def _drop_deepest(self, tier: Tier, wanted: int) -> int:
        sizes = Counter(block.blocks for block in self._where.values() if block.level is tier)
        found, least = 0, 0
        for least in sorted(sizes, reverse=True):
            found += sizes[least]
            if found >= wanted:
                break
        for key in [k for k, block in self._where.items() if block.level is tier and block.blocks >= least]:
            self._unhang(key, self._where[key])
        self._counts["boundaries_dropped"] += found
        return found

    def _unhang(self, key: int, block: Block) -> None:
        self._touch(key)
        del self._where[key]
        flat = block.facts or []
        block.facts = [x for i in range(0, len(flat), 2) if flat[i] != key for x in flat[i : i + 2]] or None


def _record(changes: Changes, key: int, old: int, now: int) -> None:
    """A boundary at another depth is published anew for all its tiers."""
    same_depth = old >> _TIER_BITS == now >> _TIER_BITS
    for tier in _tiers(now & ~old if same_depth else now):
        changes.publish.setdefault(tier, []).append((key, now >> _TIER_BITS))
    for tier in _tiers(old & ~now):
        changes.retract.setdefault(tier, []).append(key)


def _tiers(state: int) -> list[Tier]:
    return [tier for tier in _PUBLISHED if state & _BITS[tier]]


def _batches(columns: list[tuple[Tier, list[int], list[int]]]) -> Iterator[tuple[Tier, list[int], list[int]]]:
    for tier, hashes, depths in columns:
        for at in range(0, len(hashes), SNAPSHOT_ROWS):
            yield tier, hashes[at : at + SNAPSHOT_ROWS], depths[at : at + SNAPSHOT_ROWS]
