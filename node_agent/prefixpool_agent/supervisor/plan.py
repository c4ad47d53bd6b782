"""`worker.json`: what the supervisor is to run. Written by the worker, parsed here once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


class PlanError(Exception):
    """The file cannot be read or misses something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPlan:
    """A process; `env` is added to the supervisor's own. `log`: file, or "" for the supervisor's own output."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    log: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan(AgentPlan):
    """`stop_timeout_s`: from SIGTERM; 5 s later the group is killed. `startup_timeout_s`: until the gate is up, from its
    start or the last word of its download.
    """

    stop_timeout_s: float
    startup_timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One worker."""

    run_dir: Path
    engine: EnginePlan
    agent: AgentPlan

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "run_dir": str(self.run_dir)}, indent=1)


def read_plan(path: Path) -> Plan:
    """Raises PlanError."""
    try:
        data = json.loads(path.read_text())
        return Plan(
            run_dir=Path(data["run_dir"]), engine=_engine(data["engine"]), agent=AgentPlan(**_process(data["agent"]))
        )
    except (OSError, ValueError) as error:
        raise PlanError(f"{path}: {error}") from error
    except (KeyError, TypeError) as error:
        raise PlanError(f"{path}: not a worker plan: {error!r}") from error


def _engine(data: Mapping[str, Any]) -> EnginePlan:
    return EnginePlan(
        **_process(data),
        stop_timeout_s=float(data["stop_timeout_s"]),
        startup_timeout_s=float(data["startup_timeout_s"]),
    )


def _process(data: Mapping[str, Any]) -> dict[str, Any]:
    argv = tuple(str(part) for part in data["argv"])
    if not argv:
        raise ValueError("empty argv")
    return {"argv": argv, "env": {str(k): str(v) for k, v in data["env"].items()}, "log": str(data["log"] or "")}
