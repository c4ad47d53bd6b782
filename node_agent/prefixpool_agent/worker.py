"""`prefixpool-worker`: turns settings into what engine and agent are started with, then becomes their supervisor."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from prefixpool import engine_key, names
from prefixpool.api.engine import EngineKind
from prefixpool.engine_arguments import split
from prefixpool.errors import SettingsError
from prefixpool.listening import available
from prefixpool.settings import parse
from prefixpool_agent import shm
from prefixpool_agent.engines.base import EngineSpec, Host
from prefixpool_agent.engines.sim import sim_spec
from prefixpool_agent.engines.vllm import vllm_spec
from prefixpool_agent.settings import AGENT_PREFIX, WORKER_PREFIX, AgentSettings, WorkerSettings
from prefixpool_agent.supervisor.engine import make_private
from prefixpool_agent.supervisor.guard import left_over_bytes
from prefixpool_agent.supervisor.plan import AgentPlan, EnginePlan, Plan

PLAN_FILE: Final = "worker.json"
_MAX_SOCKET_PATH: Final = 107  # sockaddr_un without its NUL
_LONGEST_SOCKET: Final = max(
    (names.RUN_NOTES_SOCK, names.RUN_KV_PUB, names.RUN_KV_REPLAY, names.RUN_SUPERVISOR_SOCK), key=len
)
_COMMANDS: Final = {"inspect": "prefixpool_agent.inspection", "drain": "prefixpool_agent.drain_command"}
_DESCRIPTION: Final = """\
One replica of a pool: an engine (vLLM, or the simulated one), its agent, and a supervisor that keeps both running and is the
first process of a container. The agent tells routers what the engine's KV cache holds; routers are started on their own.

  prefixpool-worker --replica pool-0 --run-dir /run/pool-0 --model ./model --engine-key-file engine.key --device cpu
  prefixpool-worker --replica pool-0 --run-dir /run/pool-0 --model sim --engine sim --engine-key-file engine.key
  prefixpool-worker ... -- --max-num-batched-tokens 4096      what stands behind -- goes to the engine
  prefixpool-worker drain                                     fence this replica and wait for its requests (a preStop hook)
  prefixpool-worker inspect                                   tell the shape of a model, for sizing

The key is a secret that all replicas and routers of a pool share: a line of text, such as `openssl rand -hex 32` prints.
"""
_EPILOG: Final = """\
Then ask the agent, or start a router:

  curl localhost:8101/readyz                                                    ready? if not, why
  curl localhost:8101/info -H "Authorization: Bearer $(head -1 engine.key)"     what the replica is, and holds
  prefixpool-router --replica pool-0=http://localhost:8100,http://localhost:8101 --engine-key-file engine.key

Logs are in the run directory (engine.log, agent.log), or on standard output with --log-files false. SIGTERM stops engine
and agent. A whole pool on one machine is simpler: `prefixpool up`.
"""
_WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".gguf")


def engine_spec(settings: WorkerSettings, host: Host) -> EngineSpec:
    """The engine's process. Pure. Raises SettingsError."""
    return sim_spec(settings, host) if settings.engine is EngineKind.SIM else vllm_spec(settings, host)


def agent_settings(settings: WorkerSettings, engine: EngineSpec) -> AgentSettings:
    """What the agent must know of its engine. Pure."""
    return AgentSettings(
        replica=settings.replica,
        run_dir=settings.run_dir,
        engine_key_file=settings.engine_key_file,
        model=settings.model,
        served_model_name=engine.served_model_name,
        engine=settings.engine,
        engine_url=engine.url,
        host=settings.host,
        agent_port=settings.agent_port,
        block_tokens=engine.block_tokens,
        max_inflight=settings.max_inflight,
        host_kv_bytes=settings.host_kv_bytes,
        disk_kv_bytes=settings.disk_kv_bytes if settings.disk_kv_dir else 0,
        disk_kv_shared=settings.disk_kv_shared,
        startup_timeout_s=engine.startup_timeout_s,
        engine_stop_timeout_s=settings.stop_timeout_s,
        drain_timeout_s=settings.drain_timeout_s,
        log_level=settings.log_level,
    )


def worker_plan(settings: WorkerSettings, host: Host) -> Plan:
    """What the supervisor is to run. Pure. Raises SettingsError."""
    engine = engine_spec(settings, host)
    run_dir = Path(settings.run_dir)
    return Plan(
        run_dir=run_dir,
        engine=EnginePlan(
            argv=engine.argv,
            env=engine.env,
            log=str(run_dir / names.RUN_ENGINE_LOG) if settings.log_files else "",
            stop_timeout_s=settings.stop_timeout_s,
            startup_timeout_s=engine.startup_timeout_s,
        ),
        agent=AgentPlan(
            argv=(host.python, "-m", "prefixpool_agent.main"),
            env=_derived_env(agent_settings(settings, engine)),
            log=str(run_dir / names.RUN_AGENT_LOG) if settings.log_files else "",
        ),
    )


def _derived_env(settings: AgentSettings) -> dict[str, str]:
    """Only what the worker knows better: the agent's other settings may come from the environment that it inherits."""
    given = {field.name: getattr(settings, field.name) for field in msgspec.structs.fields(settings)}
    inherited = {"drain_ack_s", "scrape_interval_s", "text_bytes", "save_interval_s"}
    return {f"{AGENT_PREFIX}_{name.upper()}": _text(value) for name, value in given.items() if name not in inherited}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def look_at_host(model: str, run_dir: str) -> Host:
    """The machine, as far as adapters care. A pod's /dev/shm outlives a container that was killed, and what lies there of
    its engine is removed by the supervisor, but not yet.
    """
    return Host(
        python=sys.executable,
        cores=tuple(sorted(os.sched_getaffinity(0))),
        weight_bytes=_weight_bytes(Path(model)),
        shm_bytes=_shm_bytes(Path(run_dir)),
    )


def _shm_bytes(run_dir: Path) -> int | None:
    if not shm.SHM.is_dir():
        return None
    return shutil.disk_usage(shm.SHM).free + left_over_bytes(run_dir / names.RUN_SUPERVISOR_STATE)


def _weight_bytes(model: Path) -> int | None:
    if not model.is_dir():
        return None
    return sum(path.stat().st_size for path in model.iterdir() if path.suffix in _WEIGHT_SUFFIXES)


def read_settings(argv: Sequence[str], env: dict[str, str]) -> WorkerSettings:
    """Flags, environment, and engine arguments behind `--`. Raises SettingsError."""
    own, engine = _split_at_dashes(argv)
    parser = argparse.ArgumentParser(
        prog="prefixpool-worker",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    settings = parse(WorkerSettings, own, env, prefix=WORKER_PREFIX, parser=parser)
    changes: dict[str, Any] = {
        "run_dir": os.path.abspath(settings.run_dir),
        "engine_key_file": os.path.abspath(settings.engine_key_file),
        "host": available(settings.host),
    }
    if settings.engine_port == settings.agent_port:
        raise SettingsError(f"port {settings.engine_port} cannot be both --engine-port and --agent-port")
    split(settings.engine_args)  # unbalanced quotes are found before more is put behind them
    if engine:
        changes["engine_args"] = f"{settings.engine_args} {shlex.join(engine)}".strip()
    if os.path.isdir(settings.model):
        changes["model"] = os.path.abspath(settings.model)
    return msgspec.structs.replace(settings, **changes)


def _split_at_dashes(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def _check_files(settings: WorkerSettings) -> None:
    longest = os.path.join(settings.run_dir, _LONGEST_SOCKET)
    if len(os.fsencode(longest)) > _MAX_SOCKET_PATH:
        raise SettingsError(
            f"--run-dir={settings.run_dir}: too long for unix sockets ({_MAX_SOCKET_PATH} bytes); use a shorter path"
        )
    if _belongs_to_all(Path(settings.run_dir)):
        raise SettingsError(f"--run-dir={settings.run_dir}: others keep files there, and it would be closed to them")
    engine_key.read_sent(settings.engine_key_file)


def _belongs_to_all(folder: Path) -> bool:
    """Like /tmp. An empty one may be a mounted volume that is meant for us, and one with a plan was ours before."""
    try:
        shared = bool(folder.stat().st_mode & stat.S_IWOTH)
        return shared and not (folder / PLAN_FILE).exists() and any(folder.iterdir())
    except OSError:
        return False  # it does not exist yet, or making it private will say what is wrong with it


def _write_plan(plan: Plan) -> Path:
    """Raises SettingsError."""
    path = plan.run_dir / PLAN_FILE
    try:
        make_private(plan.run_dir)
        path.write_text(plan.to_json())
        path.chmod(0o600)
    except PermissionError as error:
        hint = f"it must belong to this user (id {os.getuid()}); name a directory below it, which is then made"
        raise SettingsError(f"--run-dir={plan.run_dir}: {error.strerror}: {hint}") from error
    except OSError as error:
        raise SettingsError(f"--run-dir={plan.run_dir}: {error.strerror}") from error
    return path


def main() -> None:
    """Does not return: becomes the supervisor, or what a sub-command names. Exit code 2 for settings that cannot work."""
    command = _COMMANDS.get(sys.argv[1] if sys.argv[1:] else "")
    if command is not None:
        os.execv(sys.executable, [sys.executable, "-m", command, *sys.argv[2:]])
    try:
        settings = read_settings(sys.argv[1:], dict(os.environ))
        _check_files(settings)
        path = _write_plan(worker_plan(settings, look_at_host(settings.model, settings.run_dir)))
    except SettingsError as error:
        sys.stderr.write(f"prefixpool-worker: {error}\n")
        sys.exit(2)
    os.execv(sys.executable, [sys.executable, "-m", "prefixpool_agent.supervisor", str(path)])


if __name__ == "__main__":
    main()
