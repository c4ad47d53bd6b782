"""An engine's answer, read as it was framed: HTTP chunks are passed on with the boundaries that the engine gave them."""

from __future__ import annotations

from typing import Final, cast

import aiohttp
from aiohttp.http import RawResponseMessage

from prefixpool_router.engine_call import EngineCall
from prefixpool_router.failures import ResetError, UnansweredError

_MAX_CHUNK_BYTES: Final = 1 << 16  # a longer HTTP chunk is passed on in pieces


class EngineAnswer:
    """An answer as it arrives. Reading it to its end gives the connection back; `close` before that breaks it."""

    __slots__ = ("_broken", "_call", "_chunked", "_content", "_partial", "_taken", "headers", "reason", "status")

    def __init__(self, call: EngineCall, head: RawResponseMessage, content: aiohttp.StreamReader) -> None:
        self.status = head.code
        self.reason = head.reason
        self.headers = head.headers
        self._call = call
        self._content = content
        self._chunked = head.chunked
        self._partial = b""
        self._taken = 0  # bytes
        self._broken: Exception | None = None

    @property
    def ended(self) -> bool:
        """All of it is read. What is kept of a chunk is not yet, though its end alone may be missing."""
        return self._content.at_eof() and not self._partial

    async def chunks(self) -> list[bytes]:
        """HTTP chunks, or pieces of a body without chunks: those that are here, after waiting for one. None: it has ended.

        Once they are `_MAX_CHUNK_BYTES` together, the others are left for the next time: a slow client has its deadline for
        what is written at once.

        Cancelling it loses nothing. Raises ResetError once all that came before the break is read, or what `fail` was given.
        """
        found: list[bytes] = []
        enough = self._taken + _MAX_CHUNK_BYTES
        while not self.ended and (not found or self._taken < min(self._content.total_bytes, enough)):
            try:
                data, complete = await self._content.readchunk()
            except (aiohttp.ClientError, OSError, RuntimeError) as error:
                self._note_break(error)
                continue
            self._taken += len(data)
            if self._partial:
                data, self._partial = self._partial + data, b""
            complete = complete or not self._chunked or self._content.at_eof()
            if data and (complete or len(data) >= _MAX_CHUNK_BYTES):
                found.append(data)
            else:
                self._partial = data
        return found

    def fail(self, failure: UnansweredError) -> None:
        """End the waiting, and the connection."""
        self._content.set_exception(failure)
        self.close()

    def close(self) -> None:
        """Break the connection, unless the answer is complete: the engine stops working on it."""
        self._call.abort()

    def _note_break(self, error: Exception) -> None:
        """Make aiohttp hand out what it has received; it says RuntimeError when that is read."""
        if self._broken is not None:
            raise ResetError("the engine broke the connection in the middle of its answer") from self._broken
        self._broken = error
        self.close()
        self._content.set_exception(cast(BaseException, None))
