"""An engine's answer on its way to the client, framed as the engine framed it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import StreamWriter

_END: Final = b"0\r\n\r\n"


class RelayedResponse(web.StreamResponse):
    """Each chunk of the engine's is one for the client, but those that came together leave together, the head with the first
    and the end with the last: every write is a system call. aiohttp would write each chunk for itself."""

    _send_headers_immediately = False
    _frames = False  # in HTTP chunks: the client knows them, and the length was not declared

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """See web.StreamResponse."""
        first, writer = not self.prepared, request.writer
        try:
            return await super().prepare(request)
        finally:  # also where that failed: the error that is sent instead is framed otherwise
            if first and isinstance(writer, StreamWriter):
                self._frames, writer.chunked = writer.chunked, False

    async def write_chunks(self, chunks: Sequence[bytes]) -> None:
        """Returns once the client has taken most of what was written before. No chunk is empty."""
        if chunks:
            await self.write(self._framed(chunks))

    async def write_last(self, chunks: Sequence[bytes] = ()) -> None:
        """The same, and that was all."""
        await self.write_eof(self._framed(chunks) + (_END if self._frames else b""))

    def _framed(self, chunks: Sequence[bytes]) -> bytes:
        if not self._frames:
            return b"".join(chunks)
        return b"".join([b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks])
