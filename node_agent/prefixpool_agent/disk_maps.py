"""Maps of texts beside the chunks on disk: what each agent told, for all that share the directory and those that come later.

    maps/<writer>.<first>-<last>.map    a piece, see map_segment.py
         <writer>.alive                 its time is when the writer was last at work
         collector                      locked by whoever takes over what dead writers left

An agent tells what it learned itself, of chunks that lie there, and only once. When enough of them have gone it tells the
rest anew. Of a writer that has ended, another takes over what is still true, and then removes the files: that one is killed
in between does no harm. Pieces of a later version, as an upgrade leaves that was undone, are left alone. Blocks: calls
belong in a thread, one at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import Final, NamedTuple
from uuid import uuid4

from prefixpool_agent import map_segment
from prefixpool_agent.map_segment import Numbers, Segment
from prefixpool_agent.residency import saved
from prefixpool_agent.residency.remembered import Facts
from prefixpool_agent.residency.saved import Kind
from prefixpool_agent.tiers.chunk_io import unlink

FOLDER: Final = "maps"
BEAT_S: Final = 60.0
LEASE_S: Final = 1800.0  # without a sign of life; looks at a large directory are minutes apart, and to be wrong does no harm
MERGED: Final = 4  # pieces of like size at once, so that each row is written a few times, however many there are
GONE: Final = 4  # one of so many told chunks is gone: time to tell the rest anew
PORTION: Final = 4096  # blocks of a map that are told at once
WAITING: Final = 65_536  # blocks that are known and do not lie on disk (yet)
_ALIVE: Final = ".alive"
_LOCK: Final = "collector"

Row = tuple[int, Facts]


class News(NamedTuple):
    """Since the last look."""

    maps: list[bytes]  # as `Residency.restore` takes them, each small enough for an event loop
    damaged: int  # files that are no maps, or not whole
    later: int  # pieces of a later version


class _Piece(NamedTuple):
    segment: Segment
    rows: int


class DiskMaps:
    """One life of one agent. `clock`: seconds, to judge by what others do; no clock of theirs is asked."""

    def __init__(self, folder: Path, kind: Kind, *, shared: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """`folder`: of the chunks; `shared`: others than this agent's own predecessors write there."""
        self._folder = folder / FOLDER
        self._kind = kind
        self._lease_s = LEASE_S if shared else 0.0
        self._clock = clock
        self._writer = uuid4().hex[:16]
        self._pieces: list[_Piece] = []  # ours, in the order of their numbers
        self._told: set[int] = set()  # blocks in them
        self._waiting: OrderedDict[int, Facts] = OrderedDict()
        self._read: dict[str, Numbers] = {}
        self._bad: set[str] = set()  # names
        self._later: set[str] = set()  # names
        self._signs: dict[str, tuple[int, float]] = {}  # of others: the last one, and when it was new to us
        self._beat_s = float("-inf")

    # -- what others told

    def read(self, rows: Iterable[Row] = ()) -> News:
        """What is new. `rows`: what was learned here meanwhile; it waits to be told unless others did. Raises OSError."""
        self._wait(rows)
        maps: list[bytes] = []
        before = len(self._bad), len(self._later)
        for one in sorted(self._unread()):
            with contextlib.suppress(OSError):  # the next look shows
                if (body := self._body(str(one))) is None:
                    continue
                if not body:
                    self._bad.add(str(one))
                    continue
                self._numbers(one.writer).add(one)
                maps += self._heard(body)
        return News(maps, len(self._bad) - before[0], len(self._later) - before[1])

    def _unread(self) -> Iterator[Segment]:
        for name in self._names():
            if not name.endswith(map_segment.SUFFIX) or name in self._bad or name in self._later:
                continue
            one = map_segment.segment(name)
            if one is None:
                self._bad.add(name)
            elif one.writer != self._writer and not self._numbers(one.writer).has(one):
                yield one

    def _heard(self, body: bytes) -> list[bytes]:
        """In portions. What waits to be told and is the same need not be any more."""
        rows = saved.load(body, self._kind)
        if rows is None:
            return [body]  # it is refused whole
        for block, facts in rows:
            if (mine := self._waiting.get(block)) is not None and _pairs(mine) <= _pairs(facts):
                del self._waiting[block]
        return [saved.dump(self._kind, rows[at : at + PORTION]) for at in range(0, len(rows), PORTION)]

    def _numbers(self, writer: str) -> Numbers:
        return self._read.setdefault(writer, Numbers())

    # -- what this agent tells

    @property
    def waiting(self) -> bool:
        """Something is not told, perhaps because it does not lie on disk."""
        return bool(self._waiting)

    def write(self, rows: Iterable[Row], lying: Set[int]) -> None:
        """Tell, of what was learned, what lies on disk. Raises OSError; what could not be told waits for the next time."""
        self._wait(rows)
        if GONE * len(self._told - lying) > len(self._told):  # before anything is told: what is merged was there to be read
            self._told = self._merge(self._pieces, lying)
        elif len(run := self._alike()) >= MERGED:
            self._merge(run, lying)
        ready = [(block, facts) for block, facts in self._waiting.items() if block in lying]
        self._tell(ready)
        for block, _ in ready:
            del self._waiting[block]
        if self._clock() - self._beat_s >= BEAT_S:
            if self._pieces:
                self._folder.mkdir(mode=0o700, exist_ok=True)
                self._folder.joinpath(f"{self._writer}{_ALIVE}").touch(mode=0o600)
            self._inherit(lying)
            self._beat_s = self._clock()  # last: what fails is tried again at each look, lest it look well in between

    def _wait(self, rows: Iterable[Row]) -> None:
        for block, facts in rows:
            self._waiting[block] = facts
            self._waiting.move_to_end(block)
        while len(self._waiting) > WAITING:
            self._waiting.popitem(last=False)

    def _tell(self, rows: Sequence[Row]) -> None:
        if not rows:
            return
        number = self._pieces[-1].segment.last + 1 if self._pieces else 1
        self._put(Segment(self._writer, number, number), rows)
        self._pieces.append(_Piece(Segment(self._writer, number, number), len(rows)))
        self._told.update(block for block, _ in rows)

    def _alike(self) -> list[_Piece]:
        """The last pieces, none of which has more rows than all behind it."""
        run: list[_Piece] = []
        for piece in reversed(self._pieces):
            if run and piece.rows > sum(each.rows for each in run):
                break
            run.insert(0, piece)
        return run

    def _merge(self, pieces: Sequence[_Piece], lying: Container[int]) -> set[int]:
        """To one, without what is gone; which blocks are left. One that is missing was taken over by another."""
        rows = map_segment.merge([self._rows(str(piece.segment)) for piece in pieces], lying)
        one = Segment(self._writer, pieces[0].segment.first, pieces[-1].segment.last)
        if rows:
            self._put(one, rows)
        for piece in pieces:
            if piece.segment != one or not rows:
                unlink(self._folder / str(piece.segment))
        at = self._pieces.index(pieces[0])
        self._pieces[at : at + len(pieces)] = [_Piece(one, len(rows))]  # without rows, too: its numbers are used up
        return {block for block, _ in rows}

    # -- what dead writers left

    def _inherit(self, lying: Container[int]) -> None:
        dead = self._dead()
        if not dead:
            return
        with _locked(self._folder / _LOCK) as mine:
            if mine:
                self._take_over(dead, lying)

    def _dead(self) -> set[str]:
        """Writers whose files have not changed for long."""
        signs: dict[str, int] = {}
        for name in self._names():
            if (writer := map_segment.writer(name)) and writer != self._writer:
                with contextlib.suppress(OSError):
                    signs[writer] = max(signs.get(writer, 0), self._folder.joinpath(name).stat().st_mtime_ns)
        now_s = self._clock()
        before = self._signs
        self._signs = {
            writer: before[writer] if writer in before and before[writer][0] == sign else (sign, now_s)
            for writer, sign in signs.items()
        }
        return {writer for writer, (_, since_s) in self._signs.items() if now_s - since_s >= self._lease_s}

    def _take_over(self, dead: Container[str], lying: Container[int]) -> None:
        """Ours first, then theirs go: at no moment is it nobody's."""
        names = {name for name in self._names() if map_segment.writer(name) in dead} - self._later
        parts, over = [], []
        for name in sorted(names, key=map_segment.age):
            if (body := self._body(name)) is None:
                continue
            told = saved.parse(body)
            if told is None or told[0] == self._kind:
                parts.append(told[1] if told is not None else [])
                over.append(name)
            elif not any(block in lying for block, _ in told[1]):
                over.append(name)  # of another kind, and of nothing that is there
        self._tell(map_segment.merge(parts, lying))
        for name in over:
            unlink(self._folder / name)

    # -- files

    def _names(self) -> list[str]:
        try:
            return os.listdir(self._folder)
        except FileNotFoundError:
            return []

    def _body(self, name: str) -> bytes | None:
        """Of one piece; empty: it is damaged. None: it was merged just now, or is of a later version.

        Whoever wrote that one knows what it says; it is remembered, and read once. Raises OSError: what cannot be read may
        be whole.
        """
        try:
            data = self._folder.joinpath(name).read_bytes()
        except FileNotFoundError:
            return None
        body = map_segment.opened(data) or b""
        if map_segment.later(data) or saved.later(body):
            self._later.add(name)
            return None
        return body

    def _rows(self, name: str) -> list[tuple[int, list[int]]]:
        """Empty: it is gone, or damaged. Raises OSError."""
        return saved.load(self._body(name) or b"", self._kind) or []

    def _put(self, one: Segment, rows: Iterable[Row]) -> None:
        """Whole or not at all, even if the machine loses power: older files may go behind this."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        fresh = self._folder / f"{one}{map_segment.TEMPORARY}"
        with open(fresh, "wb", opener=_private) as file:
            file.write(map_segment.seal(saved.dump(self._kind, rows)))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._folder / str(one))


def _pairs(facts: Facts) -> set[tuple[int, int]]:
    return set(zip(facts[::2], facts[1::2], strict=True))


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """False: another has it, or there are no locks here."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        yield False
    else:
        yield True
    finally:
        os.close(descriptor)
