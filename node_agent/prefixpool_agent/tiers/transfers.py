"""Work of I/O threads on behalf of the scheduler, which never waits: it submits, and asks now and then what has ended.

A thread on a disk that hangs cannot be stopped, but its job can be given up: reads go to a buffer of the thread's own and
are copied to the pool only while the job stands, so whoever gives a job up may reuse its place in the pool at once. The
threads are daemons: one that hangs does not keep the process from ending.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from prefixpool_agent.tiers.chunk_file import HEAD_BYTES

STOP_S: Final = 1.0


class Part(NamedTuple):
    """One chunk of a job, and its row in the pool."""

    key: bytes
    row: int


class Ended(NamedTuple):
    """A job that is over. `done`: keys whose bytes are where they should be."""

    id: int
    is_read: bool
    done: tuple[bytes, ...]
    parts: int
    late: bool  # given up at its deadline
    seconds: float

    @property
    def whole(self) -> bool:
        return len(self.done) == self.parts


class Mover(Protocol):
    """What is done with one chunk, in a thread. `buffer` is the thread's own. True: done; never raises."""

    def fetch(self, part: Part, buffer: bytearray) -> memoryview | None:
        """Read it; the payload is copied to the pool if the job still stands. None: it cannot be had."""

    def put(self, part: Part, payload: memoryview) -> bool:
        """Write it."""

    def leave(self, part: Part) -> None:
        """It will not be written: its job was given up."""


class Transfer:
    """One job: parts in order, each by any thread."""

    def __init__(self, id_: int, parts: Sequence[Part], *, is_read: bool, began_s: float) -> None:
        self.id = id_
        self.parts = parts
        self.is_read = is_read
        self.began_s = began_s
        self.lock = threading.Lock()  # of what follows, and of the pool's rows while they are copied
        self.given_up = False
        self.left = len(parts)
        self.done: set[bytes] = set()

    def end(self, now_s: float, *, late: bool = False) -> Ended:
        """Results in the order of the parts."""
        done = tuple(part.key for part in self.parts if part.key in self.done)
        return Ended(self.id, self.is_read, done, len(self.parts), late, now_s - self.began_s)


class Transfers:
    """Reader and writer threads, and their jobs. `pool`: rows of `row_bytes` each, one after the other."""

    def __init__(
        self,
        mover: Mover,
        pool: memoryview,
        *,
        row_bytes: int,
        readers: int,
        writers: int,
        deadline_s: float,
        write_deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mover = mover
        self._pool = pool
        self._row_bytes = row_bytes
        self._deadline_s = deadline_s
        self._deadlines = {True: deadline_s, False: write_deadline_s}
        self._clock = clock
        self._jobs: dict[int, Transfer] = {}
        self._over: queue.SimpleQueue[Transfer] = queue.SimpleQueue()
        self._queues = {is_read: queue.SimpleQueue[tuple[Transfer, Part] | None]() for is_read in (True, False)}
        self._readers = readers
        self._reading_since: dict[int, float] = {}  # thread -> when its present read began
        kinds = [True] * readers + [False] * writers
        self._threads = [(threading.Thread(target=self._work, args=(is_read,), daemon=True), is_read) for is_read in kinds]
        for thread, _ in self._threads:
            thread.start()

    def submit(self, id_: int, parts: Sequence[Part], *, is_read: bool) -> None:
        """Returns at once."""
        job = self._jobs[id_] = Transfer(id_, parts, is_read=is_read, began_s=self._clock())
        for part in parts:
            self._queues[is_read].put((job, part))
        if not parts:
            self._over.put(job)

    def ended(self) -> list[Ended]:
        """Since the last call; those beyond the deadline are given up now."""
        now_s = self._clock()
        out = []
        while not self._over.empty():
            job = self._over.get()
            if self._jobs.pop(job.id, None) is not None:
                out.append(job.end(now_s))
        late = [job for job in self._jobs.values() if now_s - job.began_s > self._deadlines[job.is_read]]
        return out + [self._give_up(job, now_s) for job in late]

    def give_up_all(self) -> list[Ended]:
        """No thread touches the pool behind this."""
        out = self.ended()
        now_s = self._clock()
        return out + [self._give_up(job, now_s) for job in list(self._jobs.values())]

    @property
    def waiting_parts(self) -> int:
        """Of writes that have not begun."""
        return self._queues[False].qsize()

    @property
    def busy(self) -> bool:
        """Some job is not over."""
        return bool(self._jobs)

    @property
    def stalled(self) -> bool:
        """All readers hang in a read for longer than the deadline: nothing can be had for now."""
        now_s = self._clock()
        late = [at_s for at_s in list(self._reading_since.values()) if now_s - at_s > self._deadline_s]
        return len(late) >= self._readers

    def stop(self) -> None:
        """Threads that hang are left to the end of the process."""
        self.give_up_all()
        for _, is_read in self._threads:
            self._queues[is_read].put(None)
        for thread, _ in self._threads:
            thread.join(timeout=STOP_S)
        self._pool.release()  # its owner unmaps it

    def _give_up(self, job: Transfer, now_s: float) -> Ended:
        with job.lock:
            job.given_up = True
        del self._jobs[job.id]
        return job.end(now_s, late=True)

    def _work(self, is_read: bool) -> None:
        buffer = bytearray(HEAD_BYTES + self._row_bytes)
        while (item := self._queues[is_read].get()) is not None:
            job, part = item
            done = self._write(job, part, buffer) if not is_read else not job.given_up and self._read(job, part, buffer)
            with job.lock:
                if done and not job.given_up:
                    job.done.add(part.key)
                job.left -= 1
                over = job.left == 0
            if over:
                self._over.put(job)

    def _read(self, job: Transfer, part: Part, buffer: bytearray) -> bool:
        me = threading.get_ident()
        self._reading_since[me] = self._clock()
        try:
            payload = self._mover.fetch(part, buffer)
        finally:
            del self._reading_since[me]
        if payload is None:
            return False
        with job.lock:
            if job.given_up:
                return False
            at = part.row * self._row_bytes
            self._pool[at : at + len(payload)] = payload
        return True

    def _write(self, job: Transfer, part: Part, buffer: bytearray) -> bool:
        """The row is copied first: once the job is given up it may hold another chunk."""
        at = part.row * self._row_bytes
        payload = memoryview(buffer)[: self._row_bytes]
        with job.lock:
            if standing := not job.given_up:
                payload[:] = self._pool[at : at + self._row_bytes]
        if not standing:
            self._mover.leave(part)
            return False
        return self._mover.put(part, payload)
