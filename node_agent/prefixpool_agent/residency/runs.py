"""Where a request's contents lie in the decoded bytes of its tokens. Pure.

Contents are searched in order. Text is printed by templates as it is, give or take normalisation, so probes of a few bytes
find it again behind each difference. JSON (tools, calls) is printed anew by templates: only its string literals survive.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from prefixpool.chain import Segment, SegmentKind

PROBE_BYTES: Final = 24
HEADER_BYTES: Final = 512  # longest template text that is credited to a role marker, or skipped to find a short content
_LITERAL_BYTES: Final = 12  # schema keywords are shorter and repeat: they would mislead a search
_WINDOW_BYTES: Final = 4096  # how far ahead a content is sought again behind a difference
_LOST_PROBES: Final = 16  # fruitless searches through all that is left, per request: bounds the work
_LOST_PIECES: Final = 64  # the same for pieces of JSON, of which templates leave some out
_MARKERS: Final = (b"<", b"[", b"")  # how markers begin: <|im_end|>, </s>, [/INST]; or the tokens end here
_MARKER_BYTES: Final = 4  # blanks before one
_LITERAL: Final = re.compile(rb'"((?:[^"\\]|\\.)*)"')
_CALLS: Final = b"\x1d"  # how a segment of tool calls begins
_CALL: Final = re.compile(rb"\x1d[^ \x1d]* ([^\x1d]+)")


class Run(NamedTuple):
    """`length` bytes of content, the same in both: canonical text and decoded tokens. 0: a point known in both."""

    canonical: int
    decoded: int
    length: int

    @property
    def decoded_end(self) -> int:
        return self.decoded + self.length


class Runs(NamedTuple):
    """Ascending in both, and what templates that print JSON out of order allow to be credited."""

    runs: list[Run]
    cap: int  # decoded offset: JSON moves behind here from turn to turn, so nothing behind it may be credited
    early_until: int = 0  # canonical end of JSON that is printed ahead of text which precedes it in the chain: until
    early_cap: int = 0  # then, text may be credited up to this decoded offset only


class _Json(NamedTuple):
    """A JSON segment and its neighbours among the texts."""

    start: int  # canonical
    data: bytes
    before: int  # runs of text before it


def find_runs(decoded: bytes, segments: Sequence[Segment], starts: Sequence[int]) -> Runs:
    """`starts`: canonical offset of each segment's content. Token and opaque segments are not searched."""
    search = _Search(decoded)
    texts: list[Run] = []
    pending: list[_Json] = []
    for segment, start in zip(segments, starts, strict=True):
        if segment.kind is SegmentKind.TEXT:
            search.text(segment.data, start, texts)
        elif segment.kind is SegmentKind.JSON:
            pending.append(_Json(start, segment.data, len(texts)))
    out = Runs(texts, len(decoded))
    calls = _Finder(decoded)
    for json_segment in reversed(pending):
        finder = calls if json_segment.data[:1] == _CALLS else _Finder(decoded)
        out = _with_json(out, finder, json_segment, texts)
    return out


def _with_json(runs: Runs, finder: _Finder, segment: _Json, texts: Sequence[Run]) -> Runs:
    units = list(_units(segment.data))
    if not units:
        return runs
    before = segment.before
    low = texts[before - 1].decoded_end if before else 0
    high = texts[before].decoded if before < len(texts) else len(finder.decoded)
    if found := _between(finder, segment.start, units, low, high):
        return runs._replace(runs=[*runs.runs[:before], *found, *runs.runs[before:]])
    elsewhere = max(finder.anywhere(form) for form in units[0].forms)
    if elsewhere < 0:
        return runs  # not printed, or not in the known part of the path
    cap = max((run.decoded_end for run in texts if run.decoded_end <= elsewhere), default=0)
    if elsewhere < low:
        return runs._replace(early_until=segment.start + len(segment.data), early_cap=cap)
    return runs._replace(cap=min(runs.cap, cap))


class _Search:
    """Position and patience of the search for text."""

    def __init__(self, decoded: bytes) -> None:
        self._decoded = decoded
        self._at = 0
        self._patience = _LOST_PROBES

    def text(self, data: bytes, start: int, runs: list[Run]) -> None:
        """Append the runs of one content."""
        k, anchored = 0, False
        while k < len(data):
            position = self._find(data, k, anchored)
            if position < 0:
                k += PROBE_BYTES
                continue
            length = common_bytes(self._decoded, position, data, k)
            runs.append(Run(start + k, position, length))
            k += length
            self._at = position + length
            anchored = True

    def _find(self, data: bytes, k: int, anchored: bool) -> int:
        probe = data[k : k + PROBE_BYTES]
        if k == 0 and len(probe) < PROBE_BYTES:
            return self._find_short(probe)
        far = not anchored and self._patience > 0
        at = self._decoded.find(probe, self._at, len(self._decoded) if far else self._at + _WINDOW_BYTES)
        if at < 0:
            self._patience -= far
            return at
        near = at == self._at or (k == 0 and at - self._at <= HEADER_BYTES)
        return at if near or (len(probe) == PROBE_BYTES and not probe.isspace()) else -1

    def _find_short(self, content: bytes) -> int:
        """A content of a few bytes may occur in the role's header, too: prefer where a marker of the template follows."""
        first = at = self._decoded.find(content, self._at, self._at + HEADER_BYTES + len(content))
        while at >= 0:
            follows = self._decoded[at + len(content) : at + len(content) + _MARKER_BYTES].lstrip()[:1]
            if follows in _MARKERS:
                return at
            at = self._decoded.find(content, at + 1, self._at + HEADER_BYTES + len(content))
        return first


def common_bytes(a: bytes, i: int, b: bytes, j: int) -> int:
    """Length of the common run of `a` from `i` and `b` from `j`."""
    high, low = min(len(a) - i, len(b) - j), 0
    if a[i : i + high] == b[j : j + high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if a[i + low : i + middle] == b[j + low : j + middle]:
            low = middle
        else:
            high = middle
    return low


class _Finder:
    """Looks for pieces of JSON: far ahead only until too many were not there, since clients may send any number of them."""

    def __init__(self, decoded: bytes) -> None:
        self.decoded = decoded
        self._patience = self._patience_anywhere = _LOST_PIECES

    def anywhere(self, piece: bytes) -> int:
        """Position, -1: not found."""
        at = self.decoded.find(piece) if self._patience_anywhere > 0 else -1
        self._patience_anywhere -= at < 0
        return at

    def ahead(self, piece: bytes, low: int, high: int) -> int:
        """Position between these two, -1: not found."""
        near = min(high, low + _WINDOW_BYTES)
        at = self.decoded.find(piece, low, high if self._patience > 0 else near)
        self._patience -= at < 0 and near < high
        return at


class _Unit(NamedTuple):
    """A piece of JSON that survives being printed anew."""

    offset: int
    raw: bytes  # as in the canonical text
    forms: tuple[bytes, ...]  # to look for


def _between(finder: _Finder, start: int, units: Sequence[_Unit], low: int, high: int) -> list[Run]:
    decoded = finder.decoded
    found: list[Run] = []
    for unit in units:
        for form in unit.forms:
            position = finder.ahead(form[:PROBE_BYTES], low, high)
            length = common_bytes(decoded, position, form, 0) if position >= 0 else 0
            if length and length >= min(len(form), len(decoded) - position):
                found += _unit_runs(start + unit.offset, unit.raw, form, position, length)
                low = position + length
                break
    return found


def _unit_runs(canonical: int, raw: bytes, form: bytes, decoded: int, length: int) -> list[Run]:
    if form == raw:
        return [Run(canonical, decoded, length)]
    # Printed in another form: only its two ends are known in both.
    ends = [Run(canonical, decoded, 0)]
    return [*ends, Run(canonical + len(raw), decoded + length, 0)] if length == len(form) else ends


def _units(data: bytes) -> Iterator[_Unit]:
    if data[:1] == _CALLS:  # tool calls: the arguments as a whole
        for match in _CALL.finditer(data):
            yield _Unit(match.start(1), match[1], (match[1], *_dumped(match[1])))
        return
    for match in _LITERAL.finditer(data):
        if len(match[1]) >= _LITERAL_BYTES and not match[1].isspace():
            yield _Unit(match.start(1), match[1], (match[1], *_unescaped(match[0])))


def _dumped(arguments: bytes) -> tuple[bytes, ...]:
    """As Jinja's `tojson` and Python's json print the same arguments."""
    try:
        return (json.dumps(json.loads(arguments), ensure_ascii=False).encode("utf-8", "surrogatepass"),)
    except (ValueError, RecursionError):
        return ()


def _unescaped(literal: bytes) -> tuple[bytes, ...]:
    try:
        text = msgspec.json.decode(literal, type=str).encode()
    except msgspec.DecodeError:
        return ()
    return (text,) if text != literal[1:-1] else ()
