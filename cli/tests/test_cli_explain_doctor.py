"""What `explain` shows, and which cause `doctor` names for which trouble."""

import asyncio
import io
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from rich.console import Console

from prefixpool.errors import SettingsError
from prefixpool.policy.base import Reason
from prefixpool.wire import Costs, DiskCause, DiskProblem, DrainStatus, Info, Mode, State, Template
from prefixpool_cli import doctor, explain
from prefixpool_cli.admin import AdminClient, AgentAnswer, ask_agent
from prefixpool_cli.errors import CliError
from prefixpool_cli.findings import Severity, examine
from prefixpool_router.admin import Explanations
from prefixpool_router.explain import CandidateNumbers, Ending, Explanation, Tiers
from prefixpool_router.membership import MemberState
from prefixpool_router.pictures import Account
from prefixpool_router.state import ReplicaReport, RouterReport, StateReport

DECISION = Explanation(
    id="d1",
    at=1.0,
    request_id="req-7",
    path="/v1/chat/completions",
    model="m",
    policy="prefix",
    replica="local-1",
    reason="warm",
    mode=Mode.PRECISE,
    predicted_tokens=96,
    prompt_tokens=105,
    block_tokens=32,
    excluded=("local-2",),
    candidates=[
        CandidateNumbers("local-0", 0, 0, 0, 0, 0, 0.0, 1, 0.2, 0.4, 0.6, True, 1.0),
        CandidateNumbers("local-1", 96, 0, 0, 96, 96, 0.0, 0, 0.0, 0.01, 0.1, False, 0.9),
    ],
    worker=0,
    outcome=Ending(seconds=0.25, status=200, prompt_tokens=105, cached_tokens=64, output_tokens=8),
)

TEMPLATE = Template(digest="t1")
INFO = Info(
    version="0.1.0", replica="local-0", engine="sim", engine_version="1", epoch=5, state=State.READY, reason="",
    mode=Mode.PRECISE, models=("m",), block_tokens=32, device_blocks=9, device_tokens=288, host_bytes=0, disk_bytes=0,
    boundaries=1, resident_blocks=1, inflight=0, running=0, waiting=0, restarts=0, engine_pid=1, uptime_s=1.0,
    template=TEMPLATE, costs=Costs(), drain=DrainStatus(),
)  # fmt: skip
REPLICA = ReplicaReport(
    name="local-0", engine="http://e", agent="http://a", member_state=MemberState.READY, usable=True, mode=Mode.PRECISE,
    why="", account=Account.WHOLE, engine_state=State.READY, epoch=5, models=("m",), block_tokens=32, device_tokens=288,
    inflight=0, own_inflight=0, pending_tokens=0, waiting=0, kv_usage=0.0, boundaries=1, promised_boundaries=0, trust=1.0,
    prediction_error=0.0, drifted=False, snapshots=1, stream_losses=0, costs={}, mode_why="",
)  # fmt: skip


def state(*replicas: ReplicaReport, **changes: Any) -> StateReport:
    worker = RouterReport(
        name="router-0", worker=0, pid=1, ready=True, why="", draining=False, uptime_s=1.0, policy="prefix",
        members_problem="", index_boundaries=1, index_bytes=1, index_evictions=0, promised_boundaries=0,
        replicas=list(replicas),
    )  # fmt: skip
    return StateReport(workers=[msgspec.structs.replace(worker, **changes)])


def replica(**changes: Any) -> ReplicaReport:
    return msgspec.structs.replace(REPLICA, **changes)


def info(**changes: Any) -> AgentAnswer:
    return AgentAnswer(info=msgspec.structs.replace(INFO, **changes), status=200)


def causes(found: StateReport, agents: dict[str, AgentAnswer]) -> list[str]:
    return [finding.cause for finding in examine(found, agents)]


def test_doctor_said_of_a_replica_that_is_down_only_that_it_has_no_agent() -> None:
    (finding,) = examine(state(replica(agent=None, usable=False, why="down: refused")), {})
    assert (finding.cause, finding.severity) == ("not_usable", Severity.ERROR)
    assert "down: refused" in finding.words


def test_a_healthy_pool_has_no_findings() -> None:
    assert causes(state(REPLICA), {"local-0": info()}) == []
    assert causes(state(REPLICA), {}) == []


@pytest.mark.parametrize("cause", DiskCause)
def test_doctor_said_nothing_of_a_disk_tier_that_fails(cause: DiskCause) -> None:
    problem = DiskProblem(cause=cause, words="the disk does this and that")
    (finding,) = examine(state(REPLICA), {"local-0": info(disk=problem)})
    assert finding.severity is Severity.WARNING
    assert "the disk does this and that" in finding.words
    assert finding.advice


@pytest.mark.parametrize(
    ("seen", "told", "cause"),
    [
        (replica(agent=None), None, "no_agent"),
        (replica(agent=None, usable=False, key_refused=True), None, "engine_key_refused"),
        (replica(usable=False, key_refused=True), info(), "engine_key_refused"),
        (REPLICA, AgentAnswer(problem="connection refused"), "agent_unreachable"),
        (REPLICA, AgentAnswer(problem="answers 401", status=401), "key_mismatch"),
        (REPLICA, AgentAnswer(problem="speaks another version: x", status=200), "agent_version"),
        (REPLICA, info(state=State.FAILED, reason="out of memory"), "engine_failed"),
        (REPLICA, info(state=State.STARTING), "engine_starting"),
        (REPLICA, info(state=State.STOPPED), "engine_stopped"),
        (REPLICA, info(state=State.FENCED), "fenced"),
        (REPLICA, info(replica="local-9"), "wrong_agent"),
        (REPLICA, info(epoch=6), "stale_epoch"),
        (replica(account=Account.NONE), info(), "stale_stream"),
        (replica(account=Account.WARMING), info(), "warming"),
        (REPLICA, info(mode=Mode.APPROXIMATE, reason="no events"), "no_events"),
        (REPLICA, info(block_tokens=16), "block_size_mismatch"),
        (REPLICA, info(template=Template()), "template_unknown"),
        (REPLICA, info(models=("other",)), "models_mismatch"),
        (REPLICA, info(disk=DiskProblem(cause=DiskCause.READ_ONLY, words="x")), "disk_read_only"),
        (replica(disk=DiskProblem(cause=DiskCause.HANGS, words="x")), None, "disk_hangs"),
        (replica(drifted=True), info(), "predictions_drift"),
        (replica(trust=0.2), info(), "predictions_drift"),
        (replica(usable=False, why="connection refused"), info(), "not_usable"),
    ],
)
def test_each_trouble_has_its_name(seen: ReplicaReport, told: AgentAnswer | None, cause: str) -> None:
    assert causes(state(seen), {"local-0": told} if told else {}) == [cause]


def test_a_replica_that_is_only_trusted_less_was_told_to_be_routed_by_history() -> None:
    (less,), (drifted,) = (examine(state(replica(**seen)), {}) for seen in ({"trust": 0.2}, {"drifted": True}))
    assert "by history" not in less.words
    assert "by history" in drifted.words


def test_where_the_engine_is_down_nothing_else_is_told() -> None:
    broken = replica(usable=False, account=Account.NONE, drifted=True)
    assert causes(state(broken), {"local-0": info(state=State.FAILED)}) == ["engine_failed"]


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"template": Template(digest="t2")}, "template_mismatch"),
        ({"block_tokens": 16}, "block_size_differs"),
        ({"engine_version": "2"}, "engine_versions_differ"),
    ],
)
def test_replicas_that_differ_are_told(changes: dict[str, Any], cause: str) -> None:
    second = replica(name="local-1", block_tokens=changes.get("block_tokens", 32))
    agents = {"local-0": info(), "local-1": info(replica="local-1", **changes)}
    assert causes(state(REPLICA, second), agents) == [cause]


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"members_problem": "not JSON"}, "members"),
        ({"ready": False, "why": "waiting"}, "router_not_ready"),
        ({"index_evictions": 3}, "index_full"),
        ({"replicas": []}, "no_replicas"),
    ],
)
def test_trouble_of_the_router_itself(changes: dict[str, Any], cause: str) -> None:
    assert causes(state(REPLICA, **changes), {"local-0": info()}) == [cause]


def test_errors_come_before_warnings_and_once_for_all_workers() -> None:
    one = state(replica(account=Account.WARMING), replica(name="local-1", usable=False)).workers[0]
    found = examine(StateReport(workers=[one, one]), {})
    assert [(f.severity, f.cause) for f in found] == [(Severity.ERROR, "not_usable"), (Severity.WARNING, "warming")]


@pytest.fixture
async def admin() -> AsyncIterator[str]:
    async def explanations(request: web.Request) -> web.Response:
        wanted = request.query.get("request_id", "")
        found = [DECISION] if wanted in ("", "req-7") else []
        return web.Response(body=msgspec.json.encode(Explanations(decisions=found)))

    async def state_of(_: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(state(replica(agent=agent))))

    async def info_of(request: web.Request) -> web.Response:
        good = request.headers.get("authorization") == "Bearer secret"
        return web.Response(body=msgspec.json.encode(INFO), status=200 if good else 401)

    app = web.Application()
    app.router.add_get("/explain", explanations)
    app.router.add_get("/state", state_of)
    app.router.add_get("/info", info_of)
    async with TestServer(app) as server:
        agent = str(server.make_url("")).rstrip("/")
        yield agent


def recorder() -> Console:
    return Console(record=True, width=160, file=io.StringIO())


async def test_explain_shows_numbers_reason_and_truth(admin: str) -> None:
    console = recorder()
    assert await explain.explain(admin, "req-7", 0, console, as_json=False)
    text = console.export_text()
    assert "went to local-1 (warm): it holds part of the prompt" in text
    assert "tried before and given up: local-2" in text
    assert "above its bound" in text
    assert "predicted 96 of about 105 tokens cached (knowledge: precise); actual 64 (over by 32 tokens, 1.0 blocks)" in text
    assert "answered: status 200, 8 tokens out, 0.250 s" in text


@pytest.mark.parametrize("reason", Reason)
def test_one_of_the_reasons_was_shown_without_words(reason: Reason) -> None:
    console = recorder()
    console.print(explain.details(msgspec.structs.replace(DECISION, reason=reason)))
    assert f"({reason}): {explain.WORDS[reason]}" in console.export_text()


def test_explain_tells_what_was_not_worth_loading() -> None:
    tiers = Tiers(
        device_tokens=64, host_tokens=32, held_tokens=640, load_s=0.002, recompute_s=0.1, told={"kv_load_tiers": ["x"]}
    )
    console = Console(width=200)
    with console.capture() as capture:
        console.print(explain.details(msgspec.structs.replace(DECISION, tiers=tiers)))
    assert (
        "of 640 tokens held there it uses 64 on the device, 32 in host memory, 0 on disk; loading takes 2.0 ms"
        in capture.get()
    )
    assert "told {'kv_load_tiers': ['x']}" in capture.get()


async def test_explain_whose_reader_went_away_ended_well(admin: str) -> None:
    """`prefixpool explain | true`: unlike other commands, it ends as soon as it has printed."""
    read, write = os.pipe()
    os.close(read)
    told = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "prefixpool_cli", "explain", "--admin", admin, stdout=write, stderr=asyncio.subprocess.PIPE
    )
    os.close(write)
    async with asyncio.timeout(100):
        _, errors = await told.communicate()
    assert (errors, told.returncode) == (b"", 1)


@pytest.mark.parametrize("text", ["[/x]", "[red]", "[link=http://x]", "a\\", "\x1b]0;owned\x07"])
def test_a_clients_words_were_taken_for_markup_and_ended_explain(text: str) -> None:
    one = msgspec.structs.replace(DECISION, request_id=text, model=text)
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(explain.details(one))
    console.print(explain.summary([one]))
    told = console.export_text()
    assert "\x1b" not in told
    assert told.count(text) == (0 if "\x1b" in text else 3)


async def test_explain_of_an_unknown_request_is_an_error(admin: str) -> None:
    with pytest.raises(CliError, match="no decision about request req-8"):
        await explain.explain(admin, "req-8", 0, Console(quiet=True), as_json=False)


async def test_explain_as_json_is_what_the_router_said(admin: str) -> None:
    console = recorder()
    await explain.explain(admin, "", 1, console, as_json=True)
    found = json.loads(console.export_text())
    assert found[0]["request_id"] == "req-7"
    assert found[0]["candidates"][1]["device_tokens"] == 96


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (None, "still running"),
        (Ending(seconds=0.1, abandoned="fenced"), "nothing reached the client: fenced"),
        (Ending(seconds=0.1, status=200), "the engine did not say what it found"),
        (Ending(seconds=0.1, status=499, cached_tokens=96, aborted=True), "the client went away"),
    ],
)
def test_every_ending_has_words(outcome: Ending | None, words: str) -> None:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(explain.details(msgspec.structs.replace(DECISION, outcome=outcome)))
        console.print(explain.summary([msgspec.structs.replace(DECISION, outcome=outcome)]))
    assert words in capture.get()


async def test_doctor_asks_agents_with_the_pools_key(admin: str, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    assert await doctor.doctor(admin, str(key), Console(quiet=True), as_json=False)
    key.write_text("wrong\n")
    assert not await doctor.doctor(admin, str(key), Console(quiet=True), as_json=True)


async def test_a_key_file_without_a_key_is_an_error(admin: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="none: No such file"):
        await doctor.doctor(admin, str(tmp_path / "none"), Console(quiet=True), as_json=False)


async def test_a_router_that_does_not_answer_is_told_with_its_address() -> None:
    async with aiohttp.ClientSession() as http:
        with pytest.raises(CliError, match=r"no router answers at http://127\.0\.0\.1:9"):
            await AdminClient(http, "http://127.0.0.1:9").state()
        with pytest.raises(CliError, match=r"no router answers at http://127\.0\.0\.1:9: Cannot connect"):
            await AdminClient(http, "127.0.0.1:9").state()
        assert "Cannot connect" in (await ask_agent(http, "http://127.0.0.1:9", "")).problem


@pytest.mark.parametrize("url", ["http://", "http://[::1", "http://127.0.0.1:99999", "ftp://router", "http://a..b"])
async def test_what_is_no_address_was_told_to_be_a_router_that_does_not_answer(url: str) -> None:
    with pytest.raises(CliError, match="is no address"):
        await doctor.doctor(url, "", Console(), as_json=False)


async def test_the_clients_port_is_not_the_admin_side(admin: str) -> None:
    async with aiohttp.ClientSession() as http:
        with pytest.raises(CliError, match="answers 404"):
            await AdminClient(http, admin + "/v1").state()
