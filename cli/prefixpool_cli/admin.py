"""Asking a router's admin side and agents, with errors that say what to try."""

from __future__ import annotations

from typing import Final, TypeVar

import aiohttp
import msgspec

from prefixpool import names, wire
from prefixpool_cli.errors import CliError
from prefixpool_router.admin import PATH_EXPLAIN, PATH_STATE, Explanations
from prefixpool_router.explain import Explanation
from prefixpool_router.state import StateReport

ANSWER_S: Final = 5.0
_WHERE: Final = "give the address of a router's admin side: --admin URL (`prefixpool up` prints it)"

T = TypeVar("T")


class AdminClient:
    """One router's admin side. Owns no session."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = (url if "://" in url else f"http://{url}").rstrip("/")

    async def explain(self, last: int, request_id: str = "") -> list[Explanation]:
        """Newest first. Raises CliError."""
        query = {"n": str(last)} | ({"request_id": request_id} if request_id else {})
        return (await self._get(PATH_EXPLAIN, Explanations, query)).decisions

    async def state(self) -> StateReport:
        """Raises CliError."""
        return await self._get(PATH_STATE, StateReport, {})

    async def _get(self, path: str, shape: type[T], query: dict[str, str]) -> T:
        try:
            async with self._http.get(
                self._url + path, params=query, timeout=aiohttp.ClientTimeout(total=ANSWER_S)
            ) as answer:
                body = await answer.read()
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError, UnicodeError) as error:  # the last: `http://a..b`
            raise CliError(f"{self._url!r} is no address", _WHERE) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise CliError(f"no router answers at {self._url}: {describe(error)}", _WHERE) from error
        if answer.status != 200:
            raise CliError(f"{self._url}{path} answers {answer.status}", "is this the admin side, not the one for clients?")
        try:
            return msgspec.json.decode(body, type=shape)
        except (msgspec.DecodeError, RecursionError) as error:
            raise CliError(
                f"{self._url}{path} is not what this version understands: {error}",
                "use the `prefixpool` command of the version that runs there",
            ) from error


class AgentAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What came of asking an agent: `info`, or the `problem` in words."""

    info: wire.Info | None = None
    problem: str = ""
    status: int = 0


def describe(error: Exception) -> str:
    """Its message, or its kind where it has none (timeouts do not)."""
    return str(error) or type(error).__name__


async def ask_agent(http: aiohttp.ClientSession, url: str, key: str) -> AgentAnswer:
    """Never raises: what is wrong with an agent is what the caller wants to know."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        async with http.get(
            url.rstrip("/") + names.PATH_INFO, headers=headers, timeout=aiohttp.ClientTimeout(total=ANSWER_S)
        ) as answer:
            body = await answer.read()
    except TimeoutError:
        return AgentAnswer(problem=f"no answer within {ANSWER_S:.0f} s")
    except (aiohttp.ClientError, UnicodeError) as error:  # the latter: no host can be called so
        return AgentAnswer(problem=describe(error))
    if answer.status != 200:
        return AgentAnswer(problem=f"answers {answer.status}", status=answer.status)
    try:
        return AgentAnswer(info=msgspec.json.decode(body, type=wire.Info), status=200)
    except (msgspec.DecodeError, RecursionError) as error:
        return AgentAnswer(problem=f"speaks another version: {error}", status=200)
