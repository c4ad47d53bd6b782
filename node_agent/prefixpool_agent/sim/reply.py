"""Replies: endless English-like prose, a pure function of what the prompt's cache blocks hold."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Final

from prefixpool_agent.sim.tokenizer import IM_END, SimTokenizer

_MIN_TOKENS: Final = 24
_SPAN_TOKENS: Final = 200  # natural lengths are spread evenly over this much more
_PROSE: Final = (
    "the a of and to in is that it was for on are as with they at be this have from or one had by word but not "
    "what all were we when your can said there use an each which she do how their if will up other about out "
    "many then them these so some her would make like him into time has look two more write go see number no "
    "way could people my than first water been call who oil its now find long down day did get come made may "
    "part over new sound take only little work know place year live me back give most very after thing our just "
    "name good sentence man think say great where help through much before line right too mean old any same "
    "tell boy follow came want show also around form three small set put end does another well large must big "
    "even such because turn here why ask went men read need land different home us move try kind hand picture "
    "again change off play spell air away animal house point page letter mother answer found study still learn "
    "should world "
)
_WORDS: Final = tuple(_PROSE.split())


class Reply:
    """One reply, token by token. It ends with `<|im_end|>` behind a sentence, and goes on if asked for more."""

    def __init__(self, seed: bytes, tokenizer: SimTokenizer) -> None:
        self._random = Random(seed)
        self._tokenizer = tokenizer
        self._pending: deque[int] = deque()
        self._length = _MIN_TOKENS + int(self._random.random() * _SPAN_TOKENS)
        self._sent = 0
        self._first = True

    def next_token(self, *, may_end: bool) -> int:
        """`may_end` is False for `ignore_eos` and below `min_tokens`: then prose goes on."""
        if not self._pending:
            if may_end and self._sent >= self._length:
                return IM_END
            self._pending.extend(self._tokenizer.encode(self._sentence()))
            self._first = False
        self._sent += 1
        return self._pending.popleft()

    def _sentence(self) -> str:
        words = [_WORDS[int(self._random.random() * len(_WORDS))] for _ in range(4 + int(self._random.random() * 11))]
        if len(words) > 8:
            words[len(words) // 2] += ","
        if self._random.random() < 0.1:
            words.insert(2, str(int(self._random.random() * 2000)))
        lead = "" if self._first else "\n\n" if self._random.random() < 0.1 else " "
        return lead + " ".join(words).capitalize() + "."
