"""From tokens to text as a client sees it: whole characters only, and nothing behind a stop string. Pure."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from prefixpool_agent.sim.tokenizer import SPECIAL_BYTES, token_bytes


class Detokenizer:
    """Of one reply. Text that may be the start of a stop string is held back until that is decided."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(stop)
        self._hold = max(map(len, stop), default=1) - 1
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.matched: str | None = None

    def push(self, token: int, *, last: bool) -> str:
        """Text that became certain with this token. `matched` is set when a stop string ended the reply."""
        data = b"" if token in SPECIAL_BYTES else token_bytes(token)
        text = self._held + self._decoder.decode(data, final=last)
        for stop in self._stop:
            at = text.find(stop)
            if at >= 0:
                self.matched, text, last = stop, text[:at], True
        keep = 0 if last else min(self._hold, len(text))
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]
