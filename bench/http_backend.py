"""A cheap OpenAI-shaped backend on several ports, so that a router benchmark measures the router: argv = ports.

It reads a request, looks for `"stream":true` in the body, and answers with a document or eight server-sent chunks. Of four
bytes it says that they were a token.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Final, cast

import uvloop

_USAGE: Final = b'"usage":{"prompt_tokens":%d,"completion_tokens":8}'
_ANSWER: Final = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"bench","choices":[{"index":0,"message":'
    b'{"role":"assistant","content":"Paris is the capital."},"finish_reason":"stop"}],' + _USAGE + b"}"
)
_MODELS: Final = b'{"object":"list","data":[{"id":"bench","object":"model"}]}'
_INFO: Final = (
    b'{"model_path":"bench","served_model_name":"bench","tokenizer_path":"","is_generation":true,"status":"ready"}'
)
_CHUNK: Final = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"word "}}]}\n\n'
)
_LAST: Final = b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[],' + _USAGE + b"}\n\ndata: [DONE]\n\n"


def _document(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


def _chunked(piece: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(piece), piece)


_STREAM_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def _unconnected(data: bytes | bytearray | memoryview) -> None:
    raise AssertionError("nothing is written before the connection is made")


class Backend(asyncio.Protocol):
    """One connection; requests are handled one after the other."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._need = 0  # bytes of the request under way, 0 while its head is incomplete
        self._write = _unconnected

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._write = cast("asyncio.WriteTransport", transport).write

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while self._next():
            pass

    def _next(self) -> bool:
        if not self._need:
            head_end = self._buffer.find(b"\r\n\r\n")
            if head_end < 0:
                return False
            self._need = head_end + 4 + _content_length(bytes(self._buffer[:head_end]).lower())
        if len(self._buffer) < self._need:
            return False
        self._answer(bytes(self._buffer[: self._need]))
        del self._buffer[: self._need]
        self._need = 0
        return True

    def _answer(self, request: bytes) -> None:
        if request.startswith(b"POST"):
            tail = request[-200:].replace(b" ", b"")
            if b'"stream":true' in tail or b'"stream":true' in request[:1000].replace(b" ", b""):
                self._stream(len(request) // 4)
            else:
                self._write(_document(_ANSWER % (len(request) // 4)))
            return
        path = request.split(b" ", 2)[1]
        self._write(_document(_MODELS if b"models" in path else _INFO))

    def _stream(self, tokens: int) -> None:
        self._write(_STREAM_HEAD)
        for _ in range(8):
            self._write(_chunked(_CHUNK))
        self._write(_chunked(_LAST % tokens) + b"0\r\n\r\n")


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.split(b":")[1])
    return 0


async def _serve(ports: list[int]) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(Backend, "127.0.0.1", port) for port in ports]
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    uvloop.run(_serve([int(port) for port in sys.argv[1:]]))
