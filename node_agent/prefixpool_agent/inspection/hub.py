"""A repository of the Hub: its list of files, config.json, and the headers of its weights, which are read by ranges."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import aiohttp
from yarl import URL

from prefixpool.sizing import stored
from prefixpool.sizing.errors import ShapeError

_REQUEST: Final = aiohttp.ClientTimeout(total=60)
_AT_ONCE: Final = 8
_AWAY: Final = frozenset((408, 425, 429))
_FIRST_BYTES: Final = 1 << 18  # most headers end within these
_SMALL_MOST: Final = 64 << 20  # lists, configs, indexes


class HubAwayError(ShapeError):
    """The Hub was not reached, or is not well; it may be another time."""


class Repository(NamedTuple):
    """One commit of a repository."""

    name: str
    commit: str
    files: frozenset[str]


class Hub:
    """One Hub. Everything raises ShapeError, in words for the pool's owner."""

    def __init__(self, session: aiohttp.ClientSession, url: str, token: str) -> None:
        self._session = session
        self._url = URL(url)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def repository(self, name: str, revision: str) -> Repository:
        """Which commit a revision is, and what files it has."""
        url = self._url / "api/models" / name / "revision"
        answer = stored.decoded(await self._read(URL(f"{url}/{_quoted(revision)}", encoded=True), name), name)
        files = frozenset(str(one.get("rfilename")) for one in answer.get("siblings") or ())
        return Repository(name, str(answer.get("sha") or revision), files)

    async def config(self, repository: Repository) -> dict[str, Any]:
        if stored.CONFIG not in repository.files:
            raise ShapeError(f"{repository.name} has no {stored.CONFIG}; is it a model that transformers can load?")
        return await self._decoded(repository, stored.CONFIG)

    async def weight_bytes(self, repository: Repository) -> int:
        """0 if its weights are not in safetensors files."""
        index = await self._decoded(repository, stored.INDEX) if stored.INDEX in repository.files else None
        return stored.tensor_bytes(await self._all_headers(repository, stored.weight_files(repository.files, index)))

    async def _all_headers(self, repository: Repository, names: Sequence[str]) -> list[dict[str, Any]]:
        places = asyncio.Semaphore(_AT_ONCE)

        async def one(name: str) -> dict[str, Any]:
            async with places:
                return await self._header(repository, name)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(name), name=f"header of {name}") for name in names]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        return [task.result() for task in tasks]

    async def _header(self, repository: Repository, name: str) -> dict[str, Any]:
        url = self._file(repository, name)
        start = await self._read(url, name, _FIRST_BYTES)
        end = stored.LENGTH_BYTES + stored.header_length(start[: stored.LENGTH_BYTES], name)
        text = start if len(start) >= end else await self._read(url, name, end)
        return stored.decoded(text[stored.LENGTH_BYTES : end], f"the header of {name}")

    async def _decoded(self, repository: Repository, name: str) -> dict[str, Any]:
        return stored.decoded(await self._read(self._file(repository, name), name), name)

    def _file(self, repository: Repository, name: str) -> URL:
        return self._url / repository.name / "resolve" / repository.commit / name

    async def _read(self, url: URL, what: str, most: int = 0) -> bytes:
        """The first `most` bytes, by a range; 0: all of it. A server that knows no ranges is cut off."""
        ranged = {"Range": f"bytes=0-{most - 1}"} if most else {}
        try:
            async with self._session.get(url, headers=self._headers | ranged, timeout=_REQUEST) as answer:
                if answer.status >= 400:
                    kind = HubAwayError if answer.status in _AWAY or answer.status >= 500 else ShapeError
                    raise kind(refusal(answer.status, what, self._url.host or "the Hub"))
                return await _first(answer.content, most or _SMALL_MOST)
        except (aiohttp.ClientError, TimeoutError, UnicodeError) as error:  # the last: a host that no name can be
            why = str(error) or type(error).__name__
            raise HubAwayError(f"{self._url.host} cannot be reached for {what}: {why}; is it open to pods?") from error


async def _first(content: aiohttp.StreamReader, most: int) -> bytes:
    found = bytearray()
    async for chunk in content.iter_any():
        found += chunk
        if len(found) >= most:
            break
    return bytes(found[:most])


def _quoted(revision: str) -> str:
    """Branches may have slashes, which are part of one word in the address."""
    return str(URL.build(path=revision)).replace("/", "%2F")


def refusal(status: int, what: str, host: str) -> str:
    """What an HTTP status of the Hub means for a pool's owner."""
    if status in (401, 403):
        return (
            f"{host} does not let us read {what} (HTTP {status}): there is no such model, or it needs a token that may "
            "read it (spec.model.tokenSecret), and its licence accepted on its page"
        )
    if status == 404:
        return f"{host} has no {what} at that revision: check spec.model.source and spec.model.revision"
    return f"{host} answers HTTP {status} for {what}"
