"""Load of one replica: in-flight from the shared gate state, queues from the engine's metrics, an estimate of the backlog.

Routers hear of a change at once, but at most every 50 ms, and at least every second: silence means a dead agent.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from prefixpool.wire import HEARTBEAT_S, LOAD_INTERVAL_S, Load

MAX_LIVE: Final = 4096
BYTES_PER_TOKEN: Final = 4.0  # of a request body, until answers have told
LEARN: Final = 0.05


class Backlog:
    """Prompt tokens that were admitted and are not prefilled yet. Pure. An estimate: the agent has no tokenizer."""

    def __init__(self) -> None:
        self._live: OrderedDict[str, int] = OrderedDict()
        self._bytes_per_token = BYTES_PER_TOKEN
        self.tokens = 0

    def arrived(self, id_: str, body_bytes: int, predicted_tokens: int) -> None:
        """A request passed the gate; `predicted_tokens` of it are cached."""
        expected = max(1, int(body_bytes / self._bytes_per_token) - predicted_tokens)
        self._set(id_, expected)
        if len(self._live) > MAX_LIVE:
            _, tokens = self._live.popitem(last=False)
            self.tokens -= tokens

    def stored(self, id_: str, tokens: int) -> None:
        """The engine stored blocks of the request: so much of its prefill is over."""
        if id_ in self._live:
            self._set(id_, max(0, self._live[id_] - tokens))

    def ended(self, id_: str) -> None:
        """The request is over."""
        self.tokens -= self._live.pop(id_, 0)

    def learned(self, body_bytes: int, prompt_tokens: int) -> None:
        """An answer said how many tokens a body was."""
        if body_bytes and prompt_tokens:
            self._bytes_per_token += LEARN * (body_bytes / prompt_tokens - self._bytes_per_token)

    def forget(self) -> None:
        """The engine is gone."""
        self._live.clear()
        self.tokens = 0

    def _set(self, id_: str, tokens: int) -> None:
        self.tokens += tokens - self._live.get(id_, 0)
        self._live[id_] = tokens


class LoadReporter:
    """Decides when a load is worth sending. `read` is cheap: it is called every 50 ms."""

    def __init__(
        self, read: Callable[[], Load], send: Callable[[Load], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read = read
        self._send = send
        self._clock = clock
        self._changed = asyncio.Event()
        self._last: Load | None = None
        self._sent_s = float("-inf")

    def nudge(self) -> None:
        """Something changed just now."""
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self.step()
            await self._pause()

    def step(self) -> None:
        """Send if it is time."""
        now = self._clock()
        load = self._read()
        due = HEARTBEAT_S if load == self._last else LOAD_INTERVAL_S
        if now - self._sent_s >= due:
            self._last, self._sent_s = load, now
            self._send(load)

    async def _pause(self) -> None:
        """Until something changed, but never less than the interval behind the last message."""
        self._changed.clear()
        wait = LOAD_INTERVAL_S - (self._clock() - self._sent_s)
        if wait > 0:
            await asyncio.sleep(max(wait, 0.001))  # a difference of floats can be too small to end
        else:
            try:
                async with asyncio.timeout(LOAD_INTERVAL_S):
                    await self._changed.wait()
            except TimeoutError:
                return  # counts may also change without a note: look again
