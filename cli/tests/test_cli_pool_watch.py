"""Waiting for a replica's engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from prefixpool.wire import Download, Info, State
from prefixpool_cli import pool_watch
from prefixpool_cli.pool_watch import PoolError, Replica, Watcher
from prefixpool_testing.agent_info import info

TIMEOUT_S = 250.0
DOWNLOADING = info("p-0", state=State.STARTING, download=Download(model="org/m", done_bytes=1, total_bytes=100))
STARTING = info("p-0", state=State.STARTING)
READY = info("p-0")


async def waited(folder: Path, told: list[Info], monkeypatch: pytest.MonkeyPatch) -> Info:
    """`told`: what its agent says, once every 100 s."""
    clock = SimpleNamespace(now_s=0.0)

    async def ask(*_: Any) -> Info:
        clock.now_s += 100
        return told.pop(0)

    monkeypatch.setattr(pool_watch, "agent_info", ask)
    monkeypatch.setattr(pool_watch, "POLL_S", 0)
    monkeypatch.setattr(pool_watch, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    replica = Replica("p-0", folder, "http://e", "http://a", cast(Any, SimpleNamespace(returncode=None, log=folder / "log")))
    return await Watcher(replica, "key", lambda _: ("", 0.0)).until_ready(cast(Any, None), lambda _: None, TIMEOUT_S)


async def test_time_for_a_start_ran_out_while_its_model_was_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await waited(tmp_path, [*[DOWNLOADING] * 50, *[STARTING] * 2, READY], monkeypatch) == READY


async def test_an_engine_that_is_late_behind_its_download_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PoolError, match="not ready after 250 s"):
        await waited(tmp_path, [DOWNLOADING, *[STARTING] * 3, READY], monkeypatch)
