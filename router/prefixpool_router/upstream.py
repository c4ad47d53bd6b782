"""HTTP to the engines: one client session for all of them, and its failures in the words that retries are decided by."""

from __future__ import annotations

import functools
import socket
from collections.abc import AsyncIterator
from typing import Any, Final

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload
from multidict import CIMultiDict
from yarl import URL

from prefixpool.errors import PrefixpoolError

# Engines drop idle connections after 5 s (uvicorn's default); ours must go first, or a request meets a closing connection.
_KEEPALIVE_S: Final = 4.0
_READ_BUFFER_BYTES: Final = 1 << 16  # aiohttp stops reading at twice this: what a client that does not read can pin
# A peer whose machine is gone answers nothing at all; the kernel finds out in about this time, whatever waits on the socket.
_DEAD_PEER_S: Final = 10


class UnansweredError(PrefixpoolError):
    """An attempt of which nothing has reached the client. `why` is one word, also the label of a metric."""

    why = "unanswered"
    replica_down = False

    def __init__(self, message: str = "") -> None:
        super().__init__(message or self.why)


class RefusedError(UnansweredError):
    """No connection, so nothing was sent."""

    why = "refused"
    replica_down = True


class ResetError(UnansweredError):
    """The connection broke before an answer was complete; the engine may have begun to work on the request."""

    why = "reset"
    replica_down = True


class SilentError(UnansweredError):
    """Nothing came for too long."""

    why = "timeout"


class Whole(Payload):
    """A request body held in memory. aiohttp's own payload for bytes warns above 1 MiB, which prompts may well be."""

    def __init__(self, body: bytes) -> None:
        super().__init__(body)
        self._size = len(body)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        raise TypeError("request bodies are bytes")  # called only to log a body, which must not happen

    async def as_bytes(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        body: bytes = self._value
        return body

    async def write(self, writer: AbstractStreamWriter) -> None:
        await writer.write(self._value)


class Upstream:
    """Owns the session; `close` it in the loop that made it. `connect_s`: deadline to reach an engine."""

    def __init__(self, *, connect_s: float) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,
                keepalive_timeout=_KEEPALIVE_S,
                socket_factory=_socket,
                ssl=True,
                use_dns_cache=True,
                ttl_dns_cache=10,
            ),
            timeout=aiohttp.ClientTimeout(total=None, connect=connect_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            read_bufsize=_READ_BUFFER_BYTES,
            max_line_size=1 << 16,
            max_field_size=1 << 16,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    async def send(
        self, method: str, url: URL, headers: CIMultiDict[str], body: bytes | AsyncIterator[bytes] | None
    ) -> aiohttp.ClientResponse:
        """The head of the answer, and its body as it comes. Raises RefusedError or ResetError; has no deadline."""
        data: Any = Whole(body) if isinstance(body, bytes) else body
        try:
            return await self._session.request(method, url, headers=headers, data=data, allow_redirects=False)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise RefusedError from error
        except TimeoutError:
            raise
        except (aiohttp.ClientError, OSError) as error:
            raise ResetError from error

    async def close(self) -> None:
        await self._session.close()


@functools.lru_cache(maxsize=512)
def target(engine_url: str, path_and_query: str) -> URL:
    """Memoised, because parsing a URL costs as much as sending a small request; few differ."""
    return URL(engine_url + path_and_query, encoded=True)


def _socket(address: Any) -> socket.socket:
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _DEAD_PEER_S // 2)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_PEER_S * 1000)
    return made
