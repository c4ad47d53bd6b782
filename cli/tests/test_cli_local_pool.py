"""A pool of real processes on the sim engine: starts, loses parts, grows, shrinks, and leaves nothing."""

import asyncio
import io
import json
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from rich.console import Console

from prefixpool.api.engine import EngineKind
from prefixpool_cli import doctor, pool_files
from prefixpool_cli.errors import PoolError
from prefixpool_cli.local_pool import LocalPool
from prefixpool_cli.pool_spec import PoolSpec
from prefixpool_cli.pool_watch import Stage

SPEC = PoolSpec(model="sim", engine=EngineKind.SIM, dev_mode=True, engine_args="--time-scale 0")
BODY = {"model": "sim", "messages": [{"role": "user", "content": "What is a tide gauge? " * 20}], "max_tokens": 4}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[LocalPool]:
    async with LocalPool(SPEC) as running:
        await running.start()
        yield running


async def until(true: Callable[[], Awaitable[bool]], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not await true():  # noqa: ASYNC110  # other processes change, nobody tells us
            await asyncio.sleep(0.05)


async def ask(url: str) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}/v1/chat/completions", json=BODY, timeout=aiohttp.ClientTimeout(total=20)) as answer,
    ):
        await answer.read()
        return answer.status, answer.headers.get("x-prefixpool-replica", "")


def pids(pool: LocalPool) -> set[int]:
    found = {router.process.pid for router in pool.routers if router.process is not None}
    for replica in pool.replicas.values():
        state = replica.supervisor()
        assert state is not None
        found |= {replica.process.pid, state.engine.pid or 0, state.agent.pid or 0}
    return found - {0}


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_pool_tells_how_it_starts_serves_and_leaves_nothing() -> None:
    stages: list[Stage] = []
    async with LocalPool(SPEC) as pool:
        await pool.start(stages.append)
        assert {stage.part for stage in stages if stage.ready} == {"local-0", "local-1", "router-0"}
        assert (await ask(pool.router_url))[0] == 200
        root, started = pool.root, pids(pool)
        assert len(started) == 7
    assert not root.exists()
    assert not [pid for pid in started if alive(pid)]
    assert pool.replicas == {}


@pytest.mark.asyncio(loop_scope="module")
async def test_a_killed_agent_comes_back_and_the_engine_does_not_notice(pool: LocalPool) -> None:
    before = pool.replicas["local-0"].supervisor()
    assert before is not None
    killed = pool.kill("local-0", "agent")
    assert killed == before.agent.pid

    async def back() -> bool:
        state = pool.replicas["local-0"].supervisor()
        return state is not None and state.agent.pid != killed and await pool.info("local-0") is not None

    await until(back)
    after = pool.replicas["local-0"].supervisor()
    assert after is not None
    assert after.engine == before.engine


@pytest.mark.asyncio(loop_scope="module")
async def test_a_router_can_be_killed_and_started_again_on_its_port(pool: LocalPool) -> None:
    url = pool.router_url
    pool.kill("router-0", "router")
    await pool.restart_router(policy="round_robin")
    assert pool.router_url == url
    assert {await ask(url) for _ in range(2)} == {(200, "local-0"), (200, "local-1")}
    with pytest.raises(PoolError, match="router-9: no router is running"):
        pool.kill("router-9", "router")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_router_can_be_told_of_some_replicas_only(pool: LocalPool) -> None:
    await pool.restart_router(policy="round_robin", agents=False, only=["local-1"])
    assert {await ask(pool.router_url) for _ in range(3)} == {(200, "local-1")}


@pytest.mark.asyncio(loop_scope="module")
async def test_a_pool_grows_and_shrinks(pool: LocalPool) -> None:
    assert await pool.add() == "local-2"
    await pool.restart_router(policy="round_robin")
    assert {(await ask(pool.router_url))[1] for _ in range(6)} == {"local-0", "local-1", "local-2"}
    removed = pool.replicas["local-1"]
    await pool.remove("local-1")
    assert list(pool.replicas) == ["local-0", "local-2"]
    assert removed.process.returncode == 0

    async def gone() -> bool:
        return {(await ask(pool.router_url))[1] for _ in range(4)} == {"local-0", "local-2"}

    await until(gone)


async def test_a_supervisor_that_is_killed_takes_its_engine_and_agent_with_it() -> None:
    async with LocalPool(msgspec.structs.replace(SPEC, replicas=1)) as pool:
        await pool.start()
        started = pids(pool)
        pool.kill("local-0", "supervisor")

    async def gone() -> bool:
        return not [pid for pid in started if alive(pid)]

    await until(gone)


async def test_an_engine_that_cannot_start_ends_the_start_with_its_own_words(tmp_path: Path) -> None:
    spec = msgspec.structs.replace(SPEC, replicas=1, engine_args="--time-scale nonsense", keep_logs=str(tmp_path))
    async with LocalPool(spec) as pool:
        with pytest.raises(PoolError) as caught:
            await pool.start()
    assert caught.value.message.startswith("local-")
    assert "time-scale" in caught.value.hint or "time_scale" in caught.value.hint
    assert "r0-engine.log" in os.listdir(tmp_path)


UP = (sys.executable, "-m", "prefixpool_cli", "up", "--engine", "sim", "--port", "0", "--admin-port", "0")


async def up_command(folder: Path, *, replicas: int) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(*UP, "--replicas", str(replicas)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "TMPDIR": str(folder), "PREFIXPOOL_TEST_MARK": str(folder)},
        start_new_session=True,
    )


async def told_until(up: asyncio.subprocess.Process, words: str) -> str:
    assert up.stdout is not None
    told = ""
    async with asyncio.timeout(100):
        while words not in told:
            line = await up.stdout.readline()
            assert line, told
            told += line.decode()
    return told


async def ended(up: asyncio.subprocess.Process) -> tuple[int, str]:
    """Exit status, and what else it said."""
    assert up.stdout is not None
    async with asyncio.timeout(100):
        rest = (await up.stdout.read()).decode()
        return await up.wait(), rest


async def test_up_prints_the_endpoint_and_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    up = await up_command(tmp_path, replicas=1)
    told = await told_until(up, "Ctrl-C stops everything")
    assert "curl -i http://127.0.0.1:" in told
    assert "local-0: ready" in told
    (doctor_line,) = (line.split() for line in told.splitlines() if "prefixpool doctor" in line)
    assert await doctor_is_content(*doctor_line[3::2])
    up.send_signal(signal.SIGINT)
    status, rest = await ended(up)
    assert status == 130
    assert "stopping" in rest
    assert os.listdir(tmp_path) == []
    assert not marked(str(tmp_path))


async def test_up_ended_a_pool_that_had_lost_one_supervisor_or_its_router(tmp_path: Path) -> None:
    up = await up_command(tmp_path, replicas=2)
    told = await told_until(up, "Ctrl-C stops everything")
    url = told.split("endpoint")[1].split("/v1")[0].strip()
    first, second = supervisors(str(tmp_path))
    os.kill(first, signal.SIGKILL)
    await told_until(up, "local-0: its supervisor ended with code -9; going on without this replica")
    admin = told.split("admin")[1].split()[0]
    await until(lambda: doctor_tells(admin, "not_usable local-0 (seen by router-0)"))
    (router,) = running(str(tmp_path), "prefixpool_router.main")
    os.kill(router, signal.SIGKILL)
    await told_until(up, "router-0 is ready again")
    assert await ask(url) == (200, "local-1")
    os.kill(second, signal.SIGKILL)
    status, rest = await ended(up)
    assert status == 1
    assert "no replica is left" in rest
    assert not marked(str(tmp_path))


async def doctor_is_content(admin: str, key_file: str) -> bool:
    """It could not ask the agents of a pool whose key nobody had shown."""
    console = Console(record=True, width=200, file=io.StringIO())
    good = await doctor.doctor(admin, key_file, console, as_json=False)
    return good and "agents were not asked" not in console.export_text()


async def doctor_tells(admin: str, words: str) -> bool:
    """It was silent about a replica that `up` had dropped."""
    console = Console(record=True, width=200, file=io.StringIO())
    good = await doctor.doctor(admin, "", console, as_json=False)
    return not good and words in console.export_text()


async def test_up_whose_reader_went_away_printed_a_traceback(tmp_path: Path) -> None:
    script = f"({shlex.join(UP)}; echo $? > {tmp_path}/status) 2> {tmp_path}/errors | head -1"
    env = {**os.environ, "TMPDIR": str(tmp_path), "PREFIXPOOL_TEST_MARK": str(tmp_path)}
    shell = await asyncio.create_subprocess_shell(script, stdout=asyncio.subprocess.PIPE, env=env, start_new_session=True)
    status, told = await ended(shell)
    assert (status, told.count("\n")) == (0, 1)
    assert (tmp_path / "errors").read_text() == ""
    assert (tmp_path / "status").read_text() == "1\n"
    assert sorted(os.listdir(tmp_path)) == ["errors", "status"]
    assert not marked(str(tmp_path))


async def test_up_on_a_full_disk_printed_a_traceback(tmp_path: Path) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path), "PREFIXPOOL_TEST_MARK": str(tmp_path)}
    with open("/dev/full", "w") as full:  # noqa: ASYNC230  # a device
        up = await asyncio.create_subprocess_exec(*UP, stdout=full, stderr=asyncio.subprocess.PIPE, env=env)
    async with asyncio.timeout(100):
        _, errors = await up.communicate()
    assert errors == b"error: standard output cannot be written: No space left on device\n"
    assert up.returncode == 1
    assert os.listdir(tmp_path) == []
    assert not marked(str(tmp_path))


async def test_a_killed_up_left_its_run_directory_with_its_key_behind() -> None:
    with TemporaryDirectory(prefix="pp") as folder:  # short, for sockets
        up = await up_command(Path(folder), replicas=1)
        await told_until(up, "Ctrl-C stops everything")
        (left,) = os.listdir(folder)
        up.send_signal(signal.SIGKILL)
        await up.wait()

        async def gone() -> bool:
            return not marked(folder)

        await until(gone)
        next_one = pool_files.make_run_root([folder])
        assert os.listdir(folder) == [next_one.path.name] != [left]
        next_one.remove()


def running(mark: str, module: str) -> dict[int, str]:
    """Marked processes that run a module, with the last word of their command lines."""
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in marked(mark)}
    return {pid: command[-2] for pid, command in commands.items() if module in command}


def supervisors(mark: str) -> list[int]:
    """By ordinal. Each has a guard beside it, with the same command line."""
    plans = sorted(set(running(mark, "prefixpool_agent.supervisor").values()))
    return [int(json.loads(Path(plan).with_name("supervisor.json").read_text())["pid"]) for plan in plans]


def marked(mark: str) -> list[int]:
    """Processes whose environment carries the mark."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return found
