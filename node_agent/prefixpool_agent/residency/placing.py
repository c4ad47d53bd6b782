"""Places one request's boundaries along its path of blocks: prompt, generation mark, reply. Pure."""

from __future__ import annotations

import math
import unicodedata
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from typing import Final

from prefixpool.chain import Canonical, PrefixChain, Segment, SegmentKind, prefix_chain
from prefixpool.chain.boundary import CHUNK, CONTENT_END
from prefixpool.wire import Template
from prefixpool_agent.residency.align import SURELY_A_TOKEN_BYTES, TOKEN_BYTES, Prompt, Resume, align, decode, reach
from prefixpool_agent.residency.answer import Answer
from prefixpool_agent.residency.block import Block
from prefixpool_agent.residency.boundaries import BoundaryMap
from prefixpool_agent.residency.sessions import Session
from prefixpool_agent.residency.table import TokenTable

_GROWTH: Final = 1.25  # a prompt under way is placed anew when its path has grown so much: linear work in all
_NEAR_END: Final = 0.97  # of its expected length: placed then, and
_SMALL_GROWTH: Final = 1.02  # from then on more often, because the rest may wait for a long answer
_GUESSES: Final = 8  # a path without events of its own is followed so many blocks, with so many ways to go at each


class Placer:
    """Stateless but for one fact about the template, learned on the way."""

    def __init__(
        self, table: TokenTable, block_tokens: int, template: Template, boundaries: BoundaryMap, counts: Counter[str]
    ) -> None:
        self._table = table
        self._size = block_tokens
        self._template = template
        self._boundaries = boundaries
        self._counts = counts
        self._moves = False  # the template prints tools elsewhere from turn to turn

    def place(self, session: Session, request: Canonical, chain: PrefixChain, path: Sequence[Block]) -> None:
        """Hang all boundaries whose place is known. `path`: from the root's child to the deepest block of the request."""
        answer = session.answer
        if answer is None and len(path) < session.next_blocks:
            return
        tokens = _tokens(path)
        length = answer.prompt_tokens if answer else None
        complete = length is not None and len(path) >= length // self._size
        self._boundaries.make_room(len(chain.hashes))
        resume = self._resume(request, chain, path)
        alignment = align(Prompt(tokens[:length], length, complete), self._table, request, chain, resume)
        self._moves |= alignment.moves
        for key, depth in zip(chain.hashes, alignment.depths, strict=True):
            if depth >= 0:
                self._boundaries.attach(key, depth, path)
        session.mapped_blocks = len(path)
        session.next_blocks = math.inf if alignment.covered else _worth_it(len(path), alignment.reach, chain.total_bytes)
        if answer and length is not None and len(tokens) > length:
            self._place_reply(session, request, chain.total_bytes, tokens[length:], path)

    def final_blocks(self, session: Session) -> int:
        """Length of the path when all events of an ended request have come; 0 if its answer does not tell."""
        answer = session.answer
        if answer is None or answer.prompt_tokens is None:
            return 0
        # The last token is sampled, but never computed.
        output = max(0, (answer.output_tokens or 0) - 1) if session.comparable else 0
        return (answer.prompt_tokens + output) // self._size

    def reused_path(self, session: Session) -> Block | None:
        """Where a request ends that stored nothing, so that no event carries its id: found by its known boundaries.

        What lies behind the deepest of them is followed as far as the blocks agree with the request's text.
        """
        answer, request, chain = session.answer, session.request, session.chain
        if answer is None or answer.prompt_tokens is None or request is None or chain is None:
            return None
        block = self._boundaries.lookup(chain.hashes)[1]
        for _ in range(_GUESSES):
            if block is None or block.blocks >= answer.prompt_tokens // self._size:
                break
            following = self._agreeing(block, request, chain)
            if following is None:
                break
            block = following
        return block

    def _agreeing(self, block: Block, request: Canonical, chain: PrefixChain) -> Block | None:
        children = list(block.children())
        if not 0 < len(children) <= _GUESSES:
            return None
        tokens = _tokens(block.path())
        before = reach(tokens, self._table, request, chain)
        reached = [(reach(tokens + _tokens([child]), self._table, request, chain), child) for child in children]
        best = max(far for far, _ in reached)
        found = [child for far, child in reached if far == best]
        return found[0] if best > before and len(found) == 1 else None

    def _resume(self, request: Canonical, chain: PrefixChain, path: Sequence[Block]) -> Resume | None:
        """The deepest end of a content up to which all is placed on this path: so far, tokens need not be read again."""
        known = self._known(chain, path)
        for i in range(known - 1, 0, -1):
            # Not deeper than the boundary before it: a lower bound only, where the template moves things.
            if chain.marks[i] != CONTENT_END or self._depth(chain, i) <= self._depth(chain, i - 1):
                continue
            segment = next(mark for mark in reversed(chain.marks[:i]) if mark >= 0)
            json_before = any(s.kind is SegmentKind.JSON for s in request.segments[: segment + 1])
            return None if self._moves and json_before else Resume(i, segment, self._depth(chain, i))
        return None

    def _known(self, chain: PrefixChain, path: Sequence[Block]) -> int:
        """How many boundaries, from the first on, are placed on this path."""
        block_of, length = self._boundaries.block_of, len(path)
        for i, key in enumerate(chain.hashes):
            block = block_of(key)
            if block is None or block.blocks > length:
                return i
            # Less than one block deep, a boundary is shared by prompts whose first blocks differ, and hangs on one of them.
            if path[block.blocks - 1] is not block and (block.blocks > 1 or self._depth(chain, i) >= self._size):
                return i
        return len(chain.hashes)

    def _depth(self, chain: PrefixChain, i: int) -> int:
        return self._boundaries.depth(chain.hashes[i])

    # -- the reply ------------------------------------------------------------------------------------------------------

    def _place_reply(
        self, session: Session, request: Canonical, begin: int, output: array[int], path: Sequence[Block]
    ) -> None:
        """Boundaries of the next turn, which repeats the reply. Its tokens begin at the prompt's end: no search."""
        answer = session.answer
        if answer is None:
            return
        if request.segments[0].kind is SegmentKind.TOKENS:
            self._place_tokens(request, begin, output, path)
            return
        continued = self._continued(session, request, answer)
        text, ends = decode(output, self._table)
        reply = b"" if continued is None else continued[1]
        if continued is None or text[: len(reply)] != reply[: len(text)]:
            self._counts["reply_not_credited"] += 1
            return
        chain = prefix_chain(continued[0])
        prompt = least = answer.prompt_tokens or 0
        complete = len(path) >= self.final_blocks(session)
        for key, offset, mark in zip(chain.hashes, chain.offsets, chain.marks, strict=True):
            at = offset - begin
            if at <= 0 or (at > len(text) and not complete):
                continue
            inside = mark == CHUNK or not request.generation
            merges = inside and at < len(text) + SURELY_A_TOKEN_BYTES
            least = max(least, prompt + bisect_right(ends, at) - merges)
            self._boundaries.attach(key, least, path, certain=False)

    def _place_tokens(self, request: Canonical, begin: int, output: array[int], path: Sequence[Block]) -> None:
        """A prompt of token ids is continued by token ids."""
        data = b"".join(token.to_bytes(TOKEN_BYTES, "little") for token in output)
        first = request.segments[0]
        chain = prefix_chain(request._replace(segments=(first._replace(data=first.data + data),)))
        prompt = len(first.data) // TOKEN_BYTES
        for key, offset, mark in zip(chain.hashes, chain.offsets, chain.marks, strict=True):
            if offset > begin and mark == CHUNK:
                self._boundaries.attach(key, prompt + (offset - begin) // TOKEN_BYTES, path)

    def _continued(self, session: Session, request: Canonical, answer: Answer) -> tuple[Canonical, bytes] | None:
        """The request with its reply appended, as the next turn will send it, and the reply's bytes. None: cannot be told.

        A reply that begins with a blank may merge with the text before it, so it is not credited.
        """
        text = answer.reply.strip() if self._template.trims else answer.reply
        if self._template.nfc and not text.isascii():
            text = unicodedata.normalize("NFC", text)
        reply = text.encode("utf-8", "surrogatepass")
        if request.generation and reply and not reply[:1].isspace():
            segments = (*request.segments, Segment("assistant", reply))
            return request._replace(segments=segments, generation=False), reply
        if session.path == "/v1/completions" and _starts_a_word(request.segments[0].data, text):
            segment = request.segments[0]._replace(data=request.segments[0].data + reply)
            return request._replace(segments=(segment,)), reply
        return None


def _worth_it(blocks: int, reach: int, total_bytes: int) -> float:
    """Path length at which a prompt that has come so far should be placed again."""
    near_end = _NEAR_END * blocks * total_bytes / reach if reach else math.inf
    return min(blocks * _GROWTH, near_end) if blocks < near_end else blocks * _SMALL_GROWTH


def _starts_a_word(before: bytes, text: str) -> bool:
    """Vocabularies cut before a blank and a word, so nothing merges across this seam."""
    return not before[-1:].isspace() and text[:1] == " " and text[1:2].isalnum()


def _tokens(path: Sequence[Block]) -> array[int]:
    out = array("I")
    for block in path:
        if block.tokens:
            out += block.tokens
    return out
