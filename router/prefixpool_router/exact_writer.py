"""Header fields that leave as they came, byte for byte, in either direction."""

from __future__ import annotations

from aiohttp.http import StreamWriter
from multidict import CIMultiDict


class ExactWriter(StreamWriter):
    """aiohttp reads bytes that are not UTF-8 as lone surrogates (`surrogateescape`), and its own writer leaves those out."""

    async def write_headers(self, status_line: str, headers: CIMultiDict[str]) -> None:
        """Raises ValueError for control characters, before anything is sent."""
        await super().write_headers(status_line, headers)
        if status_line.isascii() and all(map(str.isascii, headers.values())):
            return
        fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._headers_buf = f"{status_line}\r\n{fields}\r\n".encode("utf-8", "surrogateescape")
