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

    __slots__ = ("_broken", "_call", "_chunked", "_content", "_partial", "headers", "reason", "status")

    def __init__(self, call: EngineCall, head: RawResponseMessage, content: aiohttp.StreamReader) -> None:
        self.status = head.code
        self.reason = head.reason
        self.headers = head.headers
        self._call = call
        self._content = content
        self._chunked = head.chunked
        self._partial = b""
        self._broken: Exception | None = None

    async def next(self) -> bytes:
        """One HTTP chunk, or what there is of a body without chunks; b"" at the end. Cancelling it loses nothing.

        Raises ResetError once all that came before the break is read, or what `fail` was given.
        """
        while not self._content.at_eof():
            try:
                data, complete = await self._content.readchunk()
            except (aiohttp.ClientError, OSError, RuntimeError) as error:
                self._note_break(error)
                continue
            if self._partial:
                data, self._partial = self._partial + data, b""
            if data and (complete or not self._chunked or len(data) >= _MAX_CHUNK_BYTES):
                return data
            self._partial = data
        return b""

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
