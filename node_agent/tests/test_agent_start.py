"""An agent that has just started, in this process: what it says before it has an engine."""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from prefixpool import names, wire
from prefixpool_agent.download import state as download
from prefixpool_agent.download.state import DownloadState
from prefixpool_agent.main import build
from prefixpool_agent.settings import AgentSettings
from prefixpool_testing.eventually import eventually


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Short: unix sockets."""
    with tempfile.TemporaryDirectory(prefix="pp") as name:
        yield Path(name)


@asynccontextmanager
async def agent(run_dir: Path, phase: str, **changes: Any) -> AsyncIterator[Callable[[], Awaitable[wire.Info]]]:
    """One that has just started, its engine being in that phase; what it answers now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (run_dir / "key").write_text("secret\n")
    (run_dir / names.RUN_SUPERVISOR_STATE).write_text(json.dumps({"pid": 1, "engine": {"epoch": 7, "phase": phase}}))
    given = {"model": str(run_dir / "nothing"), "served_model_name": "m", "engine_url": "http://127.0.0.1:1", **changes}
    settings = AgentSettings(
        replica="p-0", run_dir=str(run_dir), engine_key_file=str(run_dir / "key"), agent_port=port, **given
    )
    async with build(settings), aiohttp.ClientSession(headers={"authorization": "Bearer secret"}) as http:

        async def info() -> wire.Info:
            async with http.get(f"http://127.0.0.1:{port}/info") as answer:
                return msgspec.json.decode(await answer.read(), type=wire.Info)

        yield info


async def said(run_dir: Path, phase: str, **changes: Any) -> wire.Info:
    """Its first answer."""
    async with agent(run_dir, phase, **changes) as info:
        return await info()


async def test_an_agent_without_tokenizer_never_called_itself_precise(run_dir: Path) -> None:
    info = await said(run_dir, "stopped", host_kv_bytes=5 << 30, disk_kv_bytes=7 << 30)
    assert (info.host_bytes, info.disk_bytes) == (5 << 30, 7 << 30)
    assert info.mode == wire.Mode.APPROXIMATE
    assert "tokenizer" in info.reason


TINY = Path(__file__).parent / "data/tiny_model"
ON_ITS_WAY = wire.Download(model="org/model", done_bytes=1, total_bytes=2, problem="no space")


async def test_a_download_is_told_while_the_engine_waits_for_it(run_dir: Path) -> None:
    download.write(run_dir, DownloadState(download=ON_ITS_WAY))
    assert (await said(run_dir, "backoff", model="org/model")).download == ON_ITS_WAY


async def test_a_download_that_is_done_is_no_news_and_its_tokenizer_is_found(run_dir: Path) -> None:
    done = DownloadState(download=wire.Download(model="org/model"), folder=str(TINY))
    download.write(run_dir, done)
    info = await said(run_dir, "backoff", model="org/model")
    assert info.download is None
    assert info.mode is wire.Mode.PRECISE


async def test_a_model_that_comes_after_the_agent_is_read_when_the_engine_serves(run_dir: Path) -> None:
    """A model on the Hub once left its replicas without a table of tokens, and so imprecise for ever."""
    answers = {
        "/health": "",
        "/metrics": 'vllm:cache_config_info{block_size="32",num_gpu_blocks="101"} 1.0\n',
        "/v1/models": '{"data": [{"id": "m"}]}',
        "/version": '{"version": "1"}',
    }
    loaded = False

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=answers[request.path], status=200 if loaded else 503)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with (
        TestServer(app) as engine,
        agent(run_dir, "running", model="org/model", engine_url=str(engine.make_url(""))) as info,
    ):
        before = await info()
        assert (before.state, before.mode) == (wire.State.STARTING, wire.Mode.APPROXIMATE)
        download.write(run_dir, DownloadState(download=wire.Download(model="org/model"), folder=str(TINY)))
        loaded = True

        async def attached() -> bool:
            return (await info()).state is wire.State.READY

        await eventually(attached, what="the agent attaches")
        assert (await info()).mode is wire.Mode.PRECISE


async def test_another_models_download_says_nothing_of_this_ones_files(run_dir: Path) -> None:
    download.write(run_dir, DownloadState(download=wire.Download(model="org/other"), folder=str(TINY)))
    assert (await said(run_dir, "backoff", model="org/model")).mode is wire.Mode.APPROXIMATE


def test_a_state_that_somebody_broke_is_none(run_dir: Path) -> None:
    assert download.read(run_dir) is None
    (run_dir / names.RUN_DOWNLOAD).write_text("{")
    assert download.read(run_dir) is None
