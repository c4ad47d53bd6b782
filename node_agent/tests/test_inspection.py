"""Inspection of a model: of a folder, of a repository on a Hub that is played here, and of everything that goes wrong."""

import json
import re
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from prefixpool.sizing import inspection
from prefixpool.sizing.errors import ShapeError
from prefixpool_agent.inspection import folder
from prefixpool_agent.inspection.__main__ import main
from prefixpool_agent.inspection.hub import Hub, HubAwayError

CONFIG = {
    "model_type": "llama", "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 1024, "vocab_size": 32000, "torch_dtype": "bfloat16", "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
COMMIT = "c0ffee"


def tensors(size: int, number: int = 1) -> bytes:
    """A file whose header speaks of `size` bytes, in so many tensors, and which has none of them."""
    each = {f"layer.{index}.weight": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for index in range(number - 1)}
    header = json.dumps({**each, "a": {"dtype": "BF16", "shape": [size // 2], "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(header)) + header + b"weights, never to be read"


def model(place: Path, **files: bytes) -> Path:
    place.mkdir()
    (place / "config.json").write_text(json.dumps(CONFIG))
    for name, content in files.items():
        (place / name).write_bytes(content)
    return place


def sharded(place: Path) -> Path:
    index = json.dumps({"metadata": {"total_size": 1}, "weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}).encode()
    shards = {SHARDS[0]: tensors(10**9), SHARDS[1]: tensors(2 * 10**9, number=9000)}  # the second header is over 256 KiB
    return model(place, **{"model.safetensors.index.json": index, **shards})


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def hub_of(place: Path, guard: Handler | None = None) -> AsyncIterator[tuple[Hub, list[str]]]:
    """A Hub with one repository, `org/model`, whose `a/branch` is COMMIT; and the ranges that it was asked for."""
    ranges: list[str] = []
    siblings = [{"rfilename": path.name} for path in place.iterdir()]  # noqa: ASYNC240 -- a test's own folder

    async def revision(request: web.Request) -> web.StreamResponse:
        if request.match_info["revision"] != "a/branch":
            raise web.HTTPNotFound
        return web.json_response({"sha": COMMIT, "siblings": siblings})

    async def resolve(request: web.Request) -> web.StreamResponse:
        ranges.append(request.headers.get("Range", ""))
        return web.FileResponse(place / request.match_info["file"])

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        return await (guard or handler)(request)

    app = web.Application(middlewares=[guarded])
    app.router.add_get("/api/models/org/model/revision/{revision}", revision)
    app.router.add_get(f"/org/model/resolve/{COMMIT}/{{file}}", resolve)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with aiohttp.ClientSession() as session:
            yield Hub(session, f"http://127.0.0.1:{runner.addresses[0][1]}", "hf_secret"), ranges
    finally:
        await runner.cleanup()


async def test_a_repository_is_read_at_one_commit_by_its_headers_only(tmp_path: Path) -> None:
    async with hub_of(sharded(tmp_path / "m")) as (hub, ranges):
        repository = await hub.repository("org/model", "a/branch")
        assert repository.commit == COMMIT
        assert (await hub.config(repository))["hidden_size"] == 512
        assert await hub.weight_bytes(repository) == 3 * 10**9
    assert ranges[:2] == ["", ""]  # config and index whole
    assert all(asked.startswith("bytes=0-") for asked in ranges[2:])
    assert len(ranges) == 5  # one file's header is longer than the first range


async def test_a_repository_without_safetensors_has_no_bytes_to_believe(tmp_path: Path) -> None:
    async with hub_of(model(tmp_path / "m", **{"pytorch_model.bin": b"x"})) as (hub, _):
        assert await hub.weight_bytes(await hub.repository("org/model", "a/branch")) == 0


async def test_the_token_goes_along(tmp_path: Path) -> None:
    async def only_with_token(request: web.Request) -> web.StreamResponse:
        raise web.HTTPForbidden if request.headers["Authorization"] == "Bearer hf_secret" else web.HTTPTeapot

    async with hub_of(model(tmp_path / "m"), only_with_token) as (hub, _):
        with pytest.raises(ShapeError, match=r"spec\.model\.tokenSecret"):
            await hub.repository("org/model", "a/branch")


@pytest.mark.parametrize(
    ("status", "words"), [(401, "there is no such model, or it needs a token"), (503, "answers HTTP 503 for org/model")]
)
async def test_what_the_hub_refuses_is_told(tmp_path: Path, status: int, words: str) -> None:
    async def refuse(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status)

    async with hub_of(model(tmp_path / "m"), refuse) as (hub, _):
        with pytest.raises(ShapeError, match=words):
            await hub.repository("org/model", "a/branch")


async def test_a_revision_that_is_not_there(tmp_path: Path) -> None:
    async with hub_of(model(tmp_path / "m")) as (hub, _):
        with pytest.raises(ShapeError, match=r"check spec\.model\.source and spec\.model\.revision"):
            await hub.repository("org/model", "another")


async def test_a_broken_file_among_many_is_named(tmp_path: Path) -> None:
    place = sharded(tmp_path / "m")
    (place / SHARDS[1]).write_bytes(b"\xff" * 100)
    async with hub_of(place) as (hub, _):
        with pytest.raises(ShapeError, match=f"{SHARDS[1]} is not a safetensors file"):
            await hub.weight_bytes(await hub.repository("org/model", "a/branch"))


@pytest.mark.parametrize("host", ["127.0.0.1", "a..b"])  # the latter cannot be a name, and ended in a traceback
async def test_a_hub_that_is_not_there(host: str) -> None:
    async with aiohttp.ClientSession() as session:
        words = rf"{re.escape(host)} cannot be reached for org/model: .*is it open to pods"
        with pytest.raises(ShapeError, match=words):
            await Hub(session, f"http://{host}:1", "").repository("org/model", "main")


def test_a_folder_is_read_by_its_headers(tmp_path: Path) -> None:
    place = sharded(tmp_path / "m")
    assert folder.config_of(place)["hidden_size"] == 512
    assert folder.weight_bytes_of(place) == 3 * 10**9
    (place / SHARDS[0]).unlink()
    assert folder.weight_bytes_of(place) == 0  # a part says little of the whole


def run(model: Path | str, output: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main(["--model", str(model), "--output", str(output)])
    return code, json.loads(capsys.readouterr().out)


def test_the_document_goes_to_standard_output_and_to_the_termination_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "termination-log"
    output.touch()
    code, printed = run(sharded(tmp_path / "m"), output, capsys)
    assert code == 0
    found = inspection.read(output.read_bytes())
    assert (found.weight_bytes, found.config["hidden_size"]) == (3 * 10**9, 512)
    assert printed["weightBytes"] == 3 * 10**9
    assert "architectures" not in found.config


def test_a_failure_is_left_in_the_same_places_and_no_file_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed = run(tmp_path, tmp_path / "termination-log", capsys)
    assert code == 1
    assert "is it the model's own folder?" in printed["error"]
    assert not (tmp_path / "termination-log").exists()


@pytest.mark.parametrize(("config", "words"), [("{", "config.json cannot be read"), ("{}", "no usable `hidden_size`")])
def test_a_config_that_sizing_could_not_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: str, words: str
) -> None:
    (tmp_path / "config.json").write_text(config)
    code, printed = run(tmp_path, tmp_path / "log", capsys)
    assert code == 1
    assert words in printed["error"]


def test_settings_that_cannot_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "--model is required" in capsys.readouterr().err


def test_a_token_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "org/model", "--token-file", str(tmp_path / "none"), "--output", ""]) == 1
    assert "token file" in capsys.readouterr().out


def test_a_hub_that_is_away_is_worth_another_try(capsys: pytest.CaptureFixture[str]) -> None:
    """A pool whose inspection met such a moment stayed without a size until somebody deleted the Job."""
    assert main(["--model", "org/model", "--hub", "http://127.0.0.1:1", "--output", ""]) == inspection.EXIT_AGAIN
    assert "cannot be reached" in capsys.readouterr().out


@pytest.mark.parametrize(("status", "away"), [(401, False), (404, False), (429, True), (503, True)])
async def test_what_the_hub_says_of_itself_may_change(tmp_path: Path, status: int, away: bool) -> None:
    async def refuse(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status)

    async with hub_of(model(tmp_path / "m"), refuse) as (hub, _):
        with pytest.raises(ShapeError) as refused:
            await hub.repository("org/model", "a/branch")
    assert isinstance(refused.value, HubAwayError) is away


def test_the_worker_has_it_as_a_sub_command(tmp_path: Path) -> None:
    argv = [
        sys.executable,
        "-m",
        "prefixpool_agent.worker",
        "inspect",
        "--model",
        str(sharded(tmp_path / "m")),
        "--output",
        "",
    ]
    done = subprocess.run(argv, capture_output=True, timeout=60, check=True)
    assert inspection.read(done.stdout).weight_bytes == 3 * 10**9
