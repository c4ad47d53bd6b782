"""What an infinite cache would have reused, and what each replica had once computed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prefixpool_cli.demo.samples import Arm, Sample, Tokens


class PrefixTree:
    """Every block of tokens ever stored, behind the blocks before it. Never forgets."""

    def __init__(self, block_tokens: int) -> None:
        self._block = block_tokens
        self._nodes: dict[tuple[int, tuple[int, ...]], int] = {}

    @property
    def tokens(self) -> int:
        """Unique tokens held, in whole blocks."""
        return len(self._nodes) * self._block

    def add(self, tokens: Sequence[int]) -> None:
        """Store the full blocks of a sequence."""
        node = 0
        for block in self._blocks(tokens, len(tokens)):
            node = self._nodes.setdefault((node, block), len(self._nodes) + 1)

    def match(self, prompt: Sequence[int]) -> int:
        """Tokens of a prompt that could be reused: whole blocks, and never the last token, which must be computed."""
        node, hit = 0, 0
        for block in self._blocks(prompt, reusable(len(prompt), self._block)):
            found = self._nodes.get((node, block))
            if found is None:
                break
            node, hit = found, hit + self._block
        return hit

    def _blocks(self, tokens: Sequence[int], end: int) -> list[tuple[int, ...]]:
        step = self._block
        return [tuple(tokens[i : i + step]) for i in range(0, end // step * step, step)]


def reusable(prompt_tokens: int, block_tokens: int) -> int:
    """The most that an engine can take from its cache for a prompt of so many tokens."""
    return max(0, prompt_tokens - 1) // block_tokens * block_tokens


def infinite_cache(arm: Arm, tokens: Mapping[int, Tokens], block_tokens: int) -> tuple[float, int]:
    """(token hit rate, unique tokens) of a cache that keeps everything, requests taken in order of completion."""
    tree = PrefixTree(block_tokens)
    hits = total = 0
    for sample in arm.answered():
        known = tokens[sample.step]
        hits += tree.match(known.prompt)
        total += len(known.prompt)
        tree.add(known.stored)
    return (hits / total if total else 0.0), tree.tokens


def lost_to_eviction(arm: Arm, tokens: Mapping[int, Tokens], block_tokens: int) -> dict[int, int]:
    """Per request, the tokens that its replica had computed before the request was sent and no longer held.

    Only earlier requests that had ended by then count, so that a neighbour still in flight is never mistaken for a loss.
    """
    trees: dict[str, PrefixTree] = {}
    waiting: dict[str, list[Sample]] = {}
    ended = arm.answered()
    lost = {}
    for sample in sorted(ended, key=lambda s: s.started_s):
        tree = trees.setdefault(sample.replica, PrefixTree(block_tokens))
        queue = waiting.setdefault(sample.replica, [s for s in ended if s.replica == sample.replica])
        while queue and queue[0].ended_s <= sample.started_s:
            tree.add(tokens[queue.pop(0).step].stored)
        lost[sample.step] = max(0, tree.match(tokens[sample.step].prompt) - sample.cached_tokens)
    return lost
