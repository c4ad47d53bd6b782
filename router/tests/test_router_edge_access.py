"""The access log: one line for each request that has ended, true of how it went, with nothing in it that was said."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import logging
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from prefixpool import logs
from prefixpool.errors import RequestError
from prefixpool_router import access_log
from prefixpool_router.access_log import AccessLog, Ended, Visit, plain
from prefixpool_testing.backend import Answer, Broken, Stream, Then, as_json, event, fenced
from prefixpool_testing.edge import EdgeUnderTest, running_edge, until

SECRET = "the prompt nobody may read"
CHAT = {"model": "m", "messages": [{"role": "user", "content": SECRET}]}
STREAM = CHAT | {"stream": True}
TOKEN = event({"choices": [{"index": 0, "delta": {"content": "t"}}]})
FIGURES = {"prompt_tokens": 90, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 64}}
USAGE = event({"choices": [], "usage": FIGURES})
PATH = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, access_log.__name__)


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Fields of the lines so far."""
    told = [record for record in caplog.records if record.name == access_log.__name__]
    assert all((record.levelname, record.message) == ("INFO", "request") for record in told)
    return [json.loads(logs.JsonLines().format(record)) for record in told]


async def only(edge: EdgeUnderTest, caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    async with asyncio.timeout(3):
        await until(lambda: not edge.edge.open_requests and lines(caplog))
    (line,) = lines(caplog)
    return line


async def ask(edge: EdgeUnderTest, body: object = CHAT, path: str = PATH, **headers: str) -> int:
    async with edge.post(path, body, headers=headers) as response:
        try:
            await response.read()
        except aiohttp.ClientError:
            return 0
        return int(response.status)


async def test_off_unless_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    async with running_edge() as edge:
        assert await ask(edge) == 200
    assert not lines(caplog)


async def test_a_whole_answer(caplog: pytest.LogCaptureFixture) -> None:
    async with running_edge(access_log=True) as edge:
        edge.backend.script(as_json({"choices": [], "usage": FIGURES}))
        async with edge.post(PATH + "?key=hidden", CHAT, headers={"x-request-id": "mine"}) as response:
            body = await response.read()
        line = await only(edge, caplog)
    assert 0 <= line.pop("first_byte_s") <= line.pop("total_s")
    assert {name: value for name, value in line.items() if name not in ("time", "level", "logger", "message")} == {
        "request_id": "mine",
        "path": PATH,
        "status": 200,
        "replica": "p-0",
        "reason": "warm",
        "attempts": 1,
        "predicted_tokens": 32,
        "cached_tokens": 64,
        "prompt_tokens": 90,
        "output_tokens": 5,
        "bytes": len(body),
        "ended": "complete",
    }


async def test_a_stream_counts_what_its_client_got(caplog: pytest.LogCaptureFixture) -> None:
    """Without the usage chunk that only the router asked for."""
    async with running_edge(access_log=True) as edge:
        edge.backend.script(Stream(TOKEN, TOKEN, USAGE))
        assert await ask(edge, STREAM) == 200
        line = await only(edge, caplog)
    assert (line["ended"], line["bytes"], line["output_tokens"]) == ("complete", 2 * len(TOKEN), 5)
    assert 0 <= line["first_byte_s"] <= line["total_s"]


@pytest.mark.parametrize("then", [Then.RESET, Then.CLOSE])
async def test_an_engine_that_dies_in_mid_stream(caplog: pytest.LogCaptureFixture, then: Then) -> None:
    async with running_edge(access_log=True) as edge:
        edge.backend.script(Stream(TOKEN, then=then))
        await ask(edge, STREAM)
        line = await only(edge, caplog)
    assert (line["status"], line["ended"], "output_tokens" in line) == (200, "engine_reset", False)


async def test_an_engine_that_falls_silent(caplog: pytest.LogCaptureFixture) -> None:
    async with running_edge(access_log=True, silence_timeout_s=0.05) as edge:
        edge.backend.script(Stream(TOKEN, then=Then.HANG))
        await ask(edge, STREAM)
        assert (await only(edge, caplog))["ended"] == "engine_timeout"


async def test_a_client_that_goes_away(caplog: pytest.LogCaptureFixture) -> None:
    async with running_edge(access_log=True) as edge:
        edge.backend.script(Stream(TOKEN, then=Then.HANG))
        async with edge.post(PATH, STREAM) as response:
            await response.content.readchunk()
            response.close()
        line = await only(edge, caplog)
    assert (line["status"], line["ended"], line["bytes"]) == (499, "client_gone", len(TOKEN))


async def test_a_client_that_goes_away_before_its_answer(caplog: pytest.LogCaptureFixture) -> None:
    async with running_edge(access_log=True) as edge:
        edge.backend.script(Broken(Then.HANG))
        asking = asyncio.ensure_future(ask(edge))
        await until(lambda: edge.backend.received)
        asking.cancel()
        line = await only(edge, caplog)
    assert (line["status"], line["ended"], line["replica"], "first_byte_s" in line) == (499, "client_gone", "p-0", False)


async def test_an_answer_that_outlasted_the_drain(caplog: pytest.LogCaptureFixture) -> None:
    async with running_edge(access_log=True) as edge:
        edge.backend.script(Stream(TOKEN, then=Then.HANG))
        async with edge.post(PATH, STREAM) as response:
            await response.content.readchunk()
            assert await edge.edge.stop(0.0) == 1
        assert (await only(edge, caplog))["ended"] == "stopped"


async def test_attempts_are_counted_and_the_last_replica_named(caplog: pytest.LogCaptureFixture) -> None:
    async with running_edge(replicas=2, access_log=True) as edge:
        edge.backend.script(fenced())
        assert await ask(edge) == 200
        line = await only(edge, caplog)
    assert (line["replica"], line["attempts"], line["ended"]) == ("p-1", 2, "complete")


async def test_an_error_of_the_engine_is_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    async with running_edge(access_log=True) as edge:
        edge.backend.script(Answer(b'{"error": "no"}', 400))
        assert await ask(edge) == 400
        line = await only(edge, caplog)
    assert (line["status"], line["ended"], line["replica"]) == (400, "complete", "p-0")


@pytest.mark.parametrize(("path", "body", "status"), [(PATH, b"{", 400), ("/nowhere", CHAT, 404), ("/v1/models", CHAT, 405)])
async def test_what_the_router_refuses(caplog: pytest.LogCaptureFixture, path: str, body: object, status: int) -> None:
    async with running_edge(access_log=True) as edge:
        async with edge.post(path, body) as response:
            size = len(await response.read())
        line = await only(edge, caplog)
    assert (line["path"], line["status"], line["ended"], line["bytes"]) == (path, status, "refused", size)
    assert not {"replica", "attempts", "predicted_tokens"} & line.keys()


async def test_what_the_router_answers_itself(caplog: pytest.LogCaptureFixture) -> None:
    async with running_edge(access_log=True, served_models=("m",)) as edge:
        edge.dispatcher.refusal = RequestError(503, "The pool has no replicas now.")
        async with edge.client.get(edge.url + "/v1/models") as response:
            size = len(await response.read())
        line = await only(edge, caplog)
    assert (line["status"], line["ended"], line["bytes"]) == (200, "complete", size)


async def test_what_no_replica_takes(caplog: pytest.LogCaptureFixture) -> None:
    async with running_edge(access_log=True) as edge:
        edge.dispatcher.refusal = RequestError(404, f"The model `{SECRET}` does not exist.")
        assert await ask(edge) == 404
        line = await only(edge, caplog)
    assert (line["status"], line["ended"]) == (404, "refused")
    assert SECRET not in str(line)


async def test_what_is_no_http(caplog: pytest.LogCaptureFixture) -> None:
    async with running_edge(access_log=True) as edge:
        reader, writer = await edge.connect()
        writer.write(SECRET.encode() + b"\r\n\r\n")
        async with asyncio.timeout(3):
            await reader.read()
        line = await only(edge, caplog)
    assert (line["status"], line["ended"]) == (400, "refused")
    assert SECRET not in str(line)


async def test_scopes_are_told_and_keys_are_not(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    keys, salt = tmp_path / "keys", tmp_path / "salt"
    keys.write_text(f"{hashlib.sha256(b'a-secret-key').hexdigest()} red\n")
    salt.write_bytes(b"s" * 16)
    async with running_edge(access_log=True, keys_file=str(keys), salt_key_file=str(salt)) as edge:
        assert await ask(edge, authorization="Bearer a-secret-key") == 200
        assert await ask(edge, b"{", authorization="Bearer a-secret-key") == 400
        assert await ask(edge, authorization="Bearer another-key") == 401
        await until(lambda: len(lines(caplog)) == 3)
    assert [line.get("scope") for line in lines(caplog)] == ["red", "red", None]
    assert not [line for line in lines(caplog) if "-key" in str(line) or SECRET in str(line)]


async def test_probes_leave_no_lines(caplog: pytest.LogCaptureFixture) -> None:
    async with running_edge(access_log=True) as edge, edge.client.get(edge.url + "/health") as response:
        assert response.status == 200
    assert not lines(caplog)


async def test_a_fault_of_the_router(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_edge(access_log=True) as edge:

        def fail(*_: object) -> None:
            raise ZeroDivisionError(SECRET)

        monkeypatch.setattr(edge.dispatcher, "dispatch", fail)
        assert await ask(edge) == 500
        line = await only(edge, caplog)
    assert (line["status"], line["ended"]) == (500, "router_failed")
    assert SECRET not in caplog.text


# -- lines


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v1/models", "/v1/models"),
        ("/v1/\x1b[2J\nx y\udcff\u2028", "/v1/?[2J?x?y??"),
        ("/" + "a" * 300, "/" + "a" * 199 + "..."),
        ("http://user:password@host/v1/models", "-"),
        ("", "-"),
    ],
)
def test_paths_are_one_short_printable_word(path: str, told: str) -> None:
    assert plain(path) == told


@pytest.mark.parametrize("json_lines", [True, False], ids=["json", "text"])
def test_a_line_in_either_format(json_lines: bool) -> None:
    stream, logger = io.StringIO(), logging.getLogger(access_log.__name__)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.JsonLines() if json_lines else logs.TextLines())
    logger.addHandler(handler)
    try:
        visit = Visit("id", '/v1/"x"')
        visit.end(Ended.REFUSED)
        AccessLog(enabled=True).write(visit, 404, 0.25)
    finally:
        logger.removeHandler(handler)
    (line,) = stream.getvalue().splitlines()
    if json_lines:
        assert {"path": '/v1/"x"', "status": 404, "total_s": 0.25, "level": "info"}.items() <= json.loads(line).items()
    else:
        assert line.endswith("request request_id=id path='/v1/\"x\"' status=404 total_s=0.25 bytes=0 ended=refused")


def test_a_flood_of_refusals_is_counted_instead_of_written(caplog: pytest.LogCaptureFixture) -> None:
    now = 10.0
    log, refused = AccessLog(enabled=True, clock=lambda: now), Visit("r", "/")
    for _ in range(5000):
        log.write(refused, 401, 0.0)
    assert len(lines(caplog)) == access_log._MOST_UNSEEN
    now += 1.0
    log.garbled(400)
    log.garbled(400)
    assert [line.get("left_out") for line in lines(caplog)[-2:]] == [5000 - access_log._MOST_UNSEEN, None]


def test_what_replicas_answered_is_never_left_out(caplog: pytest.LogCaptureFixture) -> None:
    class Placed:
        replica, reason, predicted_tokens = "a", "warm", 0

    log = AccessLog(enabled=True, clock=lambda: 10.0)
    for _ in range(3 * access_log._MOST_UNSEEN):
        visit = Visit("r", "/")
        visit.placed(Placed())  # type: ignore[arg-type]
        log.write(visit, 200, 0.0)
    assert len(lines(caplog)) == 3 * access_log._MOST_UNSEEN
