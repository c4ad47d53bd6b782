"""HTTP/1.1 as the router speaks it to engines: bytes of a request, and a parser of answers. Pure.

Why not a client library: what a router does to an answer is to pass its chunks on as they are framed. Libraries undo the
framing, at several times the cost of this parser, which is most of what one router process could do in a second. Engines are
trusted peers; still, anything that is not plainly HTTP is an error, never a guess.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from enum import Enum
from typing import Final, NamedTuple

from multidict import CIMultiDict

from prefixpool_router.failures import ResetError

_MAX_HEAD_BYTES: Final = 1 << 16
_MAX_LINE_BYTES: Final = 1 << 10  # of a chunk's size, or one trailer
_MAX_KEPT_BYTES: Final = 1 << 16  # a longer HTTP chunk is passed on in pieces
_WITHOUT_BODY: Final = frozenset({"GET", "HEAD", "DELETE"})
_NO_BODY: Final = frozenset({204, 304})


class EngineRequest(NamedTuple):
    """Fields are as a client's parser let them pass, hence without line breaks. `length` None: the body goes in chunks."""

    method: str
    target: str  # path and query
    fields: Sequence[tuple[bytes, bytes]]
    body: bytes | AsyncIterator[bytes]
    length: int | None

    def head(self, authority: str, prefix: str) -> bytes:
        """Request line and fields. `prefix`: the engine's own path before every target."""
        first = f"{self.method} {prefix}{self.target} HTTP/1.1\r\nHost: {authority}\r\n"
        lines = [first.encode("utf-8", "surrogateescape")]
        lines += [b"%b: %b\r\n" % field for field in self.fields]
        if self.length is None:
            lines.append(b"Transfer-Encoding: chunked\r\n\r\n")
        elif self.length or self.method not in _WITHOUT_BODY:
            lines.append(b"Content-Length: %d\r\n\r\n" % self.length)
        else:
            lines.append(b"\r\n")
        return b"".join(lines)


class Head(NamedTuple):
    """Of an answer."""

    status: int
    reason: str
    headers: CIMultiDict[str]


class _Framing(Enum):
    NONE = 0
    LENGTH = 1
    CHUNKED = 2
    UNTIL_CLOSE = 3


class AnswerParser:
    """One answer. `feed` returns what it completes: HTTP chunks, or pieces of a body that has none."""

    def __init__(self, method: str) -> None:
        self.head: Head | None = None
        self.complete = False
        self.reusable = False  # once complete: the connection may carry another request
        self._method = method
        self._rest = b""  # not yet understood
        self._framing = _Framing.NONE
        self._left = 0  # bytes to come: of the body, or of a long chunk including its line break
        self._in_trailer = False

    def feed(self, data: bytes) -> list[bytes]:
        """Raises ResetError for what is no HTTP, or more than one answer."""
        if self._rest:
            data = self._rest + data
            self._rest = b""
        if self.complete:
            raise ResetError("the engine sent more than its answer")
        if self.head is None:
            data = self._take_head(data)
            if self.head is None:
                return []
        if self._framing is _Framing.CHUNKED:
            return self._take_chunks(data)
        if self._framing is _Framing.LENGTH:
            return self._take_length(data)
        if self._framing is _Framing.NONE:
            self._finish(data)
            return []
        return [data] if data else []

    def end(self) -> None:
        """The connection was closed. Raises ResetError if the answer should have gone on."""
        if self.head is None or (self._framing is not _Framing.UNTIL_CLOSE and not self.complete):
            raise ResetError("the engine closed the connection in the middle of its answer")
        self.complete = True

    def _finish(self, surplus: bytes) -> None:
        self.complete = True
        if surplus:
            raise ResetError("the engine sent more than its answer")

    def _take_head(self, data: bytes) -> bytes:
        end = data.find(b"\r\n\r\n")
        if end < 0:
            if len(data) > _MAX_HEAD_BYTES:
                raise ResetError("the engine's answer has no end to its head")
            self._rest = data
            return b""
        head, version = _parse_head(data[:end])
        data = data[end + 4 :]
        if head.status < 200:
            if head.status == 101:
                raise ResetError("the engine changed protocols unasked")
            return self._take_head(data)
        self.head = head
        self._choose_framing(head, version)
        return data

    def _choose_framing(self, head: Head, version: bytes) -> None:
        headers = head.headers
        connection = headers.get("Connection", "").lower()
        self.reusable = version == b"HTTP/1.1" and "close" not in connection
        if self._method == "HEAD" or head.status in _NO_BODY:
            return
        coding = headers.get("Transfer-Encoding")
        if coding is not None:
            if coding.strip().lower() != "chunked":
                raise ResetError("the engine uses an unknown transfer coding")
            self._framing = _Framing.CHUNKED
            return
        lengths = set(headers.getall("Content-Length", ()))
        if not lengths:
            self._framing, self.reusable = _Framing.UNTIL_CLOSE, False
            return
        length = lengths.pop()
        if lengths or not (length.isascii() and length.isdigit()):
            raise ResetError("the engine sent a wrong length")
        self._framing, self._left = _Framing.LENGTH, int(length)

    def _take_length(self, data: bytes) -> list[bytes]:
        piece = data[: self._left]
        self._left -= len(piece)
        if not self._left:
            self._finish(data[len(piece) :])
        return [piece] if piece else []

    def _take_chunks(self, data: bytes) -> list[bytes]:
        out: list[bytes] = []
        at = 0
        while not self.complete:
            if self._left:
                at = self._take_long(data, at, out)
                if self._left:
                    break
            following = self._take_chunk(data, at, out)
            if following < 0:
                self._rest = data[at:]
                break
            at = following
        return out

    def _take_chunk(self, data: bytes, at: int, out: list[bytes]) -> int:
        """Where the next one begins; -1: this one is not all there yet."""
        line_end = data.find(b"\r\n", at)
        if line_end < 0:
            if len(data) - at > _MAX_LINE_BYTES:
                raise ResetError("the engine sent a chunk without a size")
            return -1
        if self._in_trailer:
            return self._take_trailer(data, at, line_end)
        size = _chunk_size(data[at:line_end])
        begin = line_end + 2
        if size == 0:
            self._in_trailer = True
            return begin
        if size > _MAX_KEPT_BYTES:
            self._left = size + 2
            return begin
        if len(data) < begin + size + 2:
            return -1
        if data[begin + size : begin + size + 2] != b"\r\n":
            raise ResetError("the engine sent a chunk that is longer than its size")
        out.append(data[begin : begin + size])
        return begin + size + 2

    def _take_long(self, data: bytes, at: int, out: list[bytes]) -> int:
        piece = data[at : at + self._left]
        self._left -= len(piece)
        # The last two bytes of what is left are the line break, which may itself be cut in two.
        body = len(piece) - max(0, 2 - self._left)
        if piece[max(body, 0) :] not in (b"", b"\r\n", b"\r", b"\n"):
            raise ResetError("the engine sent a chunk that is longer than its size")
        if body > 0:
            out.append(piece[:body])
        return at + len(piece)

    def _take_trailer(self, data: bytes, at: int, line_end: int) -> int:
        if line_end == at:
            self._finish(data[at + 2 :])
        return line_end + 2


def _parse_head(raw: bytes) -> tuple[Head, bytes]:
    first, *lines = raw.split(b"\r\n")
    version, _, rest = first.partition(b" ")
    code, _, reason = rest.partition(b" ")
    if version not in (b"HTTP/1.1", b"HTTP/1.0") or len(code) != 3 or not code.isdigit():
        raise ResetError("the engine's answer is not HTTP")
    headers: CIMultiDict[str] = CIMultiDict()
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not name or name != name.strip():
            raise ResetError("the engine's answer has a malformed head")
        headers.add(_text(name), _text(value.strip()))
    return Head(int(code), _text(reason), headers), version


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    if not 0 < len(digits) < 16 or digits.strip(b"0123456789abcdefABCDEF"):
        raise ResetError("the engine sent a chunk without a size")
    return int(digits, 16)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")
