"""An agent that has just started, in this process: what it says before it has an engine."""

from __future__ import annotations

import json
import socket
import tempfile
from pathlib import Path

import aiohttp
import msgspec

from prefixpool import names, wire
from prefixpool_agent.main import build
from prefixpool_agent.settings import AgentSettings


async def test_an_agent_without_tokenizer_never_called_itself_precise() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="pp") as name:  # short: unix sockets
        folder = Path(name)
        (folder / "key").write_text("secret\n")
        (folder / names.RUN_SUPERVISOR_STATE).write_text(json.dumps({"pid": 1, "engine": {"epoch": 7, "phase": "stopped"}}))
        settings = AgentSettings(
            replica="p-0",
            run_dir=name,
            engine_key_file=str(folder / "key"),
            model=str(folder / "nothing"),
            served_model_name="m",
            agent_port=port,
            host_kv_bytes=5 << 30,
            disk_kv_bytes=7 << 30,
        )
        async with (
            build(settings),
            aiohttp.ClientSession(headers={"authorization": "Bearer secret"}) as http,
            http.get(f"http://127.0.0.1:{port}/info") as answer,
        ):
            info = msgspec.json.decode(await answer.read(), type=wire.Info)
    assert (info.host_bytes, info.disk_bytes) == (5 << 30, 7 << 30)
    assert info.mode == wire.Mode.APPROXIMATE
    assert "tokenizer" in info.reason
