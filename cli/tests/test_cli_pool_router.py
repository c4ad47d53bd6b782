"""Waiting for a router on a loaded machine: long, not for ever, and in words. On a clock of its own."""

import asyncio
from collections.abc import Callable
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from prefixpool import names
from prefixpool_cli.errors import PoolError
from prefixpool_cli.pool_router import START_S, Router
from prefixpool_cli.pool_watch import Stage

pytestmark = pytest.mark.looptime


class Answers:
    """As aiohttp's session. `said(seconds)`: the answer, or None for a connection that is refused."""

    def __init__(self, said: Callable[[float], str | None]) -> None:
        self._said = said

    def get(self, url: str, timeout: Any) -> "Answers":
        assert url == f"http://127.0.0.1:2{names.PATH_READYZ}"
        return self

    async def __aenter__(self) -> "Answers":
        if self._said(asyncio.get_running_loop().time()) is None:
            raise TimeoutError
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def read(self) -> bytes:
        return (self._said(asyncio.get_running_loop().time()) or "").encode()


async def waited(
    folder: Path, said: Callable[[float], str | None], timeout_s: float = inf, ends_s: float = inf
) -> list[Stage]:
    router = Router("router-0", "127.0.0.1", (1, 2), folder / "router-0.log")
    router.log.write_text("its last words\n")
    router.process = cast(Any, SimpleNamespace(returncode=None))
    asyncio.get_running_loop().call_at(min(ends_s, 1e9), lambda: setattr(router.process, "returncode", 3))
    stages: list[Stage] = []
    await router.until_ready(cast(Any, Answers(said)), stages.append, timeout_s)
    return stages


WAITING = '{"ready": false, "why": "no usable replica"}'
READY = '{"ready": true, "why": "all"}'


async def test_a_router_that_was_not_ready_after_20_s_ended_the_pool(tmp_path: Path) -> None:
    stages = await waited(tmp_path, lambda now_s: WAITING if now_s < 30 else READY)
    assert {stage.words for stage in stages} == {"not ready yet: no usable replica", "ready"}
    assert stages[0].elapsed_s > 1, "what is waited for is no news at once"
    assert stages[-1].ready


async def test_a_slow_start_is_no_death(tmp_path: Path) -> None:
    stages = await waited(tmp_path, lambda now_s: None if now_s < START_S - 1 else READY)
    assert [stage.words for stage in stages] == ["ready"]


@pytest.mark.parametrize(
    ("said", "timeout_s", "ends_s", "words"),
    [
        (None, inf, inf, "router-0 does not answer after 60 s"),
        (None, inf, 7.0, "router-0 ended with code 3"),
        (WAITING, inf, 7.0, "router-0 ended with code 3"),
        (WAITING, 25.0, inf, "router-0 is not ready after 25 s: no usable replica"),
        ("nonsense", inf, inf, "router-0 does not answer after 60 s"),
    ],
)
async def test_a_router_that_will_not_come_is_not_waited_for(
    tmp_path: Path, said: str | None, timeout_s: float, ends_s: float, words: str
) -> None:
    with pytest.raises(PoolError) as caught:
        await waited(tmp_path, lambda _: said, timeout_s, ends_s)
    assert caught.value.message == words
    assert caught.value.hint == "its last words"
