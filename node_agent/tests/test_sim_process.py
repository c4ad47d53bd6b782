"""`prefixpool-sim` as a program: flags, start, the real gate around it, KV events, stop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio

from prefixpool import names
from prefixpool_agent.gate_state import GateState
from prefixpool_agent.sim.events import END_SEQUENCE

DEADLINE_S = 20
CHAT = "/v1/chat/completions"
LONG = [{"role": "user", "content": " ".join(f"word{i}" for i in range(60))}]


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="pp") as path:
        yield Path(path)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


async def start(*flags: str, env: dict[str, str] | None = None) -> asyncio.subprocess.Process:
    argv = (sys.executable, "-m", "prefixpool_agent.sim.main", "--model", "m", *flags)
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*argv, env=os.environ | (env or {}), stdout=pipe, stderr=pipe)


@asynccontextmanager
async def sim(*flags: str, **env: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, aiohttp.ClientSession]]:
    port = free_port()
    process = await start("--port", str(port), *flags, env=env)
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", timeout=aiohttp.ClientTimeout(DEADLINE_S)) as session:
            await answering(session, process)
            yield process, session
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def answering(session: aiohttp.ClientSession, process: asyncio.subprocess.Process) -> None:
    for _ in range(DEADLINE_S * 50):
        assert process.returncode is None, process.stderr and await process.stderr.read()
        try:
            async with session.get("/health"):
                return
        except aiohttp.ClientConnectionError:
            await asyncio.sleep(0.02)
    raise AssertionError("the sim does not answer")


async def test_sigterm_ends_it_with_zero_and_running_requests_with_abort() -> None:
    async with sim("--decode-step-s", "0.02") as (process, session):
        body = {"messages": LONG, "max_tokens": 5000, "ignore_eos": True, "stream": True}
        async with session.post(CHAT, json=body) as answer:
            await answer.content.readline()
            process.send_signal(signal.SIGTERM)
            rest = (await answer.content.read()).decode()
        assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 0
    assert '"finish_reason":"abort"' in rest
    assert rest.endswith("data: [DONE]\n\n")


async def test_sigint_ends_an_idle_sim_with_zero_and_nothing_is_printed() -> None:
    async with sim() as (process, _):
        process.send_signal(signal.SIGINT)
        assert list(await asyncio.wait_for(process.communicate(), DEADLINE_S)) == [b"", b""]
        assert process.returncode == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--max-model-len", "8192", "--num-gpu-blocks-override", "256"), "--max-model-len=8192 does not fit"),
        (("--kv-events-config", "{"), "--kv-events-config"),
        (("--middleware", "no.such.Thing"), "--middleware='no.such.Thing' cannot be loaded"),
        (("--block-size", "x"), "--block-size"),
        (("--time-scale", "-1"), "--time-scale"),
    ],
)
async def test_settings_that_cannot_work_are_refused_in_words(flags: tuple[str, ...], words: str) -> None:
    process = await start(*flags)
    _, stderr = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert process.returncode == 1
    assert words in stderr.decode()
    assert "Traceback" not in stderr.decode()


async def test_without_dev_mode_the_cache_cannot_be_reset() -> None:
    async with sim(VLLM_SERVER_DEV_MODE="0") as (_, session), session.post("/reset_prefix_cache") as answer:
        assert answer.status == 404


async def stored(folder: Path) -> list[dict[str, object]]:
    """All `BlockStored` events so far."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.connect(f"ipc://{folder}/{names.RUN_KV_REPLAY}")
        await client.send_multipart([b"", bytes(8)])
        found: list[dict[str, object]] = []
        while (frames := await asyncio.wait_for(client.recv_multipart(), DEADLINE_S))[2] != END_SEQUENCE:
            found += [event for event in msgspec.msgpack.decode(frames[3])[1] if event["type"] == "BlockStored"]
        return found


async def test_behind_the_real_gate_only_the_key_opens_it_and_events_carry_the_gates_label(folder: Path) -> None:
    key_file = folder / "key"
    key_file.write_text("secret")
    GateState.create(folder / names.RUN_GATE_STATE)
    config = {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{folder}/{names.RUN_KV_PUB}",
        "replay_endpoint": f"ipc://{folder}/{names.RUN_KV_REPLAY}",
    }
    env = {names.ENV_RUN_DIR: str(folder), names.ENV_EPOCH: "5", names.ENV_ENGINE_KEY_FILE: str(key_file)}
    flags = ("--middleware", "prefixpool_agent.gate.Gate", "--kv-events-config", json.dumps(config))
    body = {"messages": LONG, "max_tokens": 1, "session_id": "the client's"}
    async with sim(*flags, **env) as (_, session):
        async with session.post(CHAT, json=body) as refused:
            assert refused.status == 401
        async with session.post(CHAT, json=body, headers={"authorization": "Bearer secret"}) as answer:
            usage = (await answer.json())["usage"]
        events = await stored(folder)
    tokens = usage["prompt_tokens"] // 32 * 32
    assert [len(event["token_ids"]) for event in events if isinstance(event["token_ids"], list)] == [tokens]
    assert events[0]["session_id"] not in (None, "the client's")
