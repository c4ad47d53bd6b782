"""Boundary -> token depth: how many tokens surely lie inside a prefix of the text. Pure; no tokenizer.

A cut inside text may change the token before it, because what follows may merge with it otherwise: of the tokens that end
before a cut, one is not counted (measured on three vocabularies: none or one changes in 98.5 % of cuts, and within whole
blocks the mapping never over-predicted by more than one).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

from prefixpool.chain import Canonical, PrefixChain, Segment, SegmentKind
from prefixpool.chain.boundary import CHUNK, CONTENT_END
from prefixpool_agent.residency.runs import HEADER_BYTES, Runs, find_runs
from prefixpool_agent.residency.table import TokenTable

UNKNOWN: Final = -1  # its place is not on the known part of the path, or nothing may be credited
SURELY_A_TOKEN_BYTES: Final = 16  # text of this length behind a token contains another token's end
TOKEN_BYTES: Final = 4  # of a TOKENS segment
HEADER_TOKENS: Final = 48  # of a role's header, a default system text included; an image has more


class Decoded(NamedTuple):
    """Tokens as text."""

    text: bytes
    ends: list[int]  # offset of each token's end


class Resume(NamedTuple):
    """A boundary whose place is known: the end of a segment's content."""

    boundary: int  # index in the chain
    segment: int
    tokens: int  # token depth


class Alignment(NamedTuple):
    """Depth of each boundary of a chain, and what else was seen on the way."""

    depths: array[int]
    reach: int  # canonical bytes that the tokens cover
    covered: bool  # all contents were found
    moves: bool  # the template prints its JSON elsewhere from turn to turn


class Prompt(NamedTuple):
    """What is known of the tokens that the engine made of a request."""

    tokens: Sequence[int]  # of the prompt, from its start, as far as its blocks are known
    length: int | None  # of the whole prompt, once the answer has told it
    complete: bool  # no more whole block will come


def decode(tokens: Sequence[int], table: TokenTable) -> Decoded:
    """Bytes of the tokens."""
    try:
        pieces = list(map(table.__getitem__, tokens))
    except LookupError:  # a table that does not keep to b"" for ids without a text, which clients may send
        pieces = [_piece(table, token) for token in tokens]
    return Decoded(b"".join(pieces), list(accumulate(map(len, pieces))))


def _piece(table: TokenTable, token: int) -> bytes:
    try:
        return table[token]
    except LookupError:
        return b""


def align(
    prompt: Prompt, table: TokenTable, request: Canonical, chain: PrefixChain, resume: Resume | None = None
) -> Alignment:
    """Token depths of a request's boundaries; those up to `resume` are left UNKNOWN."""
    if request.segments[0].kind is SegmentKind.TOKENS:
        return _exact(prompt, request, chain)
    skip, first, base = (resume.boundary + 1, resume.segment + 1, resume.tokens) if resume else (0, 0, 0)
    starts, segments = content_starts(chain, len(request.segments))[first:], request.segments[first:]
    decoded = decode(prompt.tokens[base:] if base else prompt.tokens, table)
    runs = find_runs(decoded.text, segments, starts)
    opaque = _opaque(segments, starts, runs, decoded.ends)
    text = _Text(decoded, runs, prompt.complete, opaque, None if request.generation else chain.total_bytes)
    depths = array("i", [UNKNOWN]) * len(chain.offsets)
    least = base
    for i in range(skip, len(depths)):
        if chain.marks[i] != len(request.segments):
            depth = text.depth(chain.offsets[i], chain.marks[i])
            if depth != UNKNOWN:  # what is sure of a shorter prefix is sure of a longer one
                least = depths[i] = max(least, base + depth)
    if prompt.complete and prompt.length is not None and opaque is None and runs.cap == len(decoded.text):
        if request.generation:
            depths[-1] = prompt.length  # behind the generation prompt: all of it
        elif len(request.segments) == 1:
            depths[-1] = prompt.length - 1  # a completion's last token may merge with what continues it
    content_end = starts[-1] + len(segments[-1].data) if segments else 0
    return Alignment(depths, text.reach, text.reach >= content_end, runs.cap < len(decoded.text))


def reach(tokens: Sequence[int], table: TokenTable, request: Canonical, chain: PrefixChain) -> int:
    """How far into a request's canonical text these tokens agree with it, in bytes."""
    if request.segments[0].kind is SegmentKind.TOKENS:
        given = request.segments[0].data
        same = b"".join(token.to_bytes(TOKEN_BYTES, "little") for token in tokens) == given[: len(tokens) * TOKEN_BYTES]
        return len(tokens) * TOKEN_BYTES if same else 0
    starts = content_starts(chain, len(request.segments))
    runs = find_runs(decode(tokens, table).text, request.segments, starts).runs
    return runs[-1].canonical + runs[-1].length if runs else 0


def _opaque(segments: Sequence[Segment], starts: Sequence[int], runs: Runs, ends: Sequence[int]) -> int | None:
    """Canonical offset behind which nothing may be credited: an image's. None: there is no image.

    Some templates have the engine print a message's images ahead of its text (vLLM: whatever the order of the parts). Then
    the text before the image in the chain stands behind it in the prompt, and another image changes all of that.
    """
    at = next((i for i, segment in enumerate(segments) if segment.kind is SegmentKind.OPAQUE), None)
    if not at:
        return None if at is None else starts[0]
    begin, end = starts[at - 1], starts[at - 1] + len(segments[at - 1].data)
    run = next((run for run in runs.runs if begin <= run.canonical < end), None)
    if run is None:
        return starts[at]
    before = max((each.decoded_end for each in runs.runs if each.canonical < begin), default=0)
    header = bisect_right(ends, run.decoded) - bisect_left(ends, before)
    return starts[at] if header <= HEADER_TOKENS else begin - 1


def content_starts(chain: PrefixChain, segments: int) -> list[int]:
    """Canonical offset of each segment's content: where the mark behind its role marker stands."""
    return [offset for offset, mark in zip(chain.offsets, chain.marks, strict=True) if 0 <= mark < segments]


def _exact(prompt: Prompt, request: Canonical, chain: PrefixChain) -> Alignment:
    """A prompt of token ids: no text, nothing to search, if these are what the engine has read."""
    data, start = request.segments[0].data, chain.offsets[0]
    given = [int.from_bytes(data[i : i + TOKEN_BYTES], "little") for i in range(0, len(data), TOKEN_BYTES)]
    same = list(prompt.tokens) == given[: len(prompt.tokens)]
    known = len(given) if prompt.complete else len(prompt.tokens)
    cuts = [max(0, offset - start) // TOKEN_BYTES for offset in chain.offsets]
    depths = array("i", [cut if same and cut <= known else UNKNOWN for cut in cuts])
    covered = len(prompt.tokens) * TOKEN_BYTES if same else 0
    return Alignment(depths, covered, covered >= len(data), moves=False)


class _Text:
    """The alignment of one text, asked boundary by boundary."""

    def __init__(self, decoded: Decoded, runs: Runs, complete: bool, opaque: int | None, open_end: int | None) -> None:
        self._ends = decoded.ends
        self._size = len(decoded.text)
        self._runs = runs
        self._starts = [run.canonical for run in runs.runs]
        self._complete = complete
        self._opaque = opaque
        self._open_end = open_end  # end of a prompt that the next one may continue in the middle of its text
        self.reach = runs.runs[-1].canonical + runs.runs[-1].length if runs.runs else 0

    def depth(self, offset: int, mark: int) -> int:
        """Tokens that surely lie before this canonical offset."""
        if self._opaque is not None and offset > self._opaque:
            return UNKNOWN
        if not self._complete and offset > self.reach:
            return UNKNOWN  # perhaps in blocks that are still to come
        at = self._place(offset, mark)
        whole = bisect_right(self._ends, min(at, self._cap(offset)))
        inside = mark == CHUNK or (mark == CONTENT_END and offset == self._open_end)
        merges = inside and at < self._size + SURELY_A_TOKEN_BYTES
        return max(0, whole - merges)

    def _cap(self, offset: int) -> int:
        return min(self._runs.cap, self._runs.early_cap) if offset < self._runs.early_until else self._runs.cap

    def _place(self, offset: int, mark: int) -> int:
        """Decoded offset of a canonical one, or one that surely lies before it."""
        j = bisect_right(self._starts, offset) - 1
        if j < 0:
            return 0
        run = self._runs.runs[j]
        into = offset - run.canonical
        if into == 0 and mark >= 0:  # content begins here; the role's header before it is shared, too
            before = self._runs.runs[j - 1].decoded_end if j else 0
            return run.decoded if run.decoded - before <= HEADER_BYTES else before
        if into <= run.length or run.decoded_end == self._size:  # inside, or behind the end of the known path
            return run.decoded + into
        return run.decoded_end
