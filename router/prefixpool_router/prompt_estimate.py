"""How many tokens a prompt has, without a tokenizer: what is known of its beginning, and bytes per token for the rest.

Bytes per token are learned from `usage`, per model. The token depth of a boundary that some agent has published is exact,
and the same for all replicas: the estimate starts from the deepest one.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, NamedTuple

from prefixpool.chain import PrefixChain
from prefixpool.levels import Walk

DEFAULT_BYTES_PER_TOKEN: Final = 4.0  # English text; learned after the first answer
_MEMORY_BYTES: Final = 200_000.0  # canonical bytes of prompts that the running ratio remembers
_MAX_MODELS: Final = 64  # names come from clients
_SANE: Final = (0.25, 64.0)  # bytes per token; token ids as prompts are 4, images can be far below 1


class Anchor(NamedTuple):
    """A boundary whose token depth is known."""

    offset: int  # bytes
    tokens: int
    boundaries: int  # up to here, this one included

    @classmethod
    def reached(cls, chain: PrefixChain, walk: Walk) -> Anchor:
        """The deepest one that anybody holds, with all before it."""
        at = walk.reached
        return cls(chain.offsets[at], walk.depth, at + 1) if at >= 0 else NO_ANCHOR

    @classmethod
    def find(cls, chain: PrefixChain, depth: Callable[[int], int]) -> Anchor:
        """About the deepest one: bisection, which holes in the index can mislead, but not far (it is an estimate)."""
        known = bisect_left(chain.hashes, True, key=lambda boundary: not depth(boundary))
        return cls(chain.offsets[known - 1], depth(chain.hashes[known - 1]), known) if known else NO_ANCHOR


NO_ANCHOR: Final = Anchor(0, 0, 0)


class PromptEstimate:
    """Token depths of one prompt. `exact`: the end of the prompt is itself a boundary whose depth is known."""

    __slots__ = ("_anchor", "_bytes_per_token", "exact", "total")

    def __init__(self, total_bytes: int, bytes_per_token: float, anchor: Anchor = NO_ANCHOR) -> None:
        self._anchor = anchor
        self._bytes_per_token = bytes_per_token
        self.exact = anchor.offset == total_bytes > 0
        self.total = max(1, self.at(total_bytes))

    def at(self, offset: int) -> int:
        """Tokens before this offset."""
        return self.depths((offset,))[0]

    def of(self, offsets: array[int]) -> Callable[[int], list[int]]:
        """Tokens before these offsets, from one of them on; computed when asked."""
        return lambda first: self.depths(offsets[first:])

    def depths(self, offsets: array[int] | tuple[int, ...]) -> list[int]:
        """Tokens before each of these offsets."""
        known_bytes, known_tokens, _ = self._anchor
        before = known_tokens / known_bytes if known_bytes else 0.0
        behind = 1.0 / self._bytes_per_token
        return [
            int(known_tokens + (offset - known_bytes) * behind) if offset > known_bytes else int(offset * before)
            for offset in offsets
        ]


class TokenEstimate:
    """Learns bytes per token, per model; not thread-safe."""

    def __init__(self) -> None:
        self._ratio: OrderedDict[str, tuple[float, float]] = OrderedDict()  # model -> (bytes, tokens) of recent prompts

    def bytes_per_token(self, model: str) -> float:
        """Of canonical text, template overhead included."""
        found = self._ratio.get(model)
        return found[0] / found[1] if found else DEFAULT_BYTES_PER_TOKEN

    def learn(self, model: str, canonical_bytes: int, prompt_tokens: int) -> None:
        """From one answer. Ratios that no text has (a prompt of images) are ignored."""
        if canonical_bytes <= 0 or prompt_tokens <= 0 or not _SANE[0] <= canonical_bytes / prompt_tokens <= _SANE[1]:
            return
        known_bytes, known_tokens = self._ratio.pop(model, (0.0, 0.0))
        total = known_bytes + canonical_bytes
        keep = min(1.0, _MEMORY_BYTES / total)
        self._ratio[model] = (total * keep, (known_tokens + prompt_tokens) * keep)
        if len(self._ratio) > _MAX_MODELS:
            self._ratio.popitem(last=False)
