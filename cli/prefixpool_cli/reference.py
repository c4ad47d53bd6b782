"""Reference pages made from the code: settings, metrics, headers, InferencePool. A test compares (`make docs`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from prefixpool import names
from prefixpool import settings as core_settings
from prefixpool.api import page
from prefixpool_agent import settings as agent_settings
from prefixpool_agent.inspection import settings as inspection_settings
from prefixpool_agent.metrics import AgentMetrics
from prefixpool_agent.sim import settings as sim_settings
from prefixpool_cli.explain import WORDS
from prefixpool_operator import settings as operator_settings
from prefixpool_operator.metrics import OperatorMetrics
from prefixpool_router import settings as router_settings
from prefixpool_router.metrics import EdgeMetrics, RoutingMetrics

_MADE: Final = "<!-- Made from the code by `make docs`. Change the code, not this page. -->\n"


class _Program(NamedTuple):
    command: str
    about: str
    settings: type[msgspec.Struct]
    prefix: str


_PROGRAMS: Final = (
    _Program("prefixpool-router", "The router.", router_settings.RouterSettings, router_settings.PREFIX),
    _Program(
        "prefixpool-worker",
        "Supervisor, engine and agent of one replica. What stands behind `--` goes to the engine.",
        agent_settings.WorkerSettings,
        agent_settings.WORKER_PREFIX,
    ),
    _Program(
        "prefixpool-agent",
        "The agent of one replica; the worker starts it and derives these settings from its own.",
        agent_settings.AgentSettings,
        agent_settings.AGENT_PREFIX,
    ),
    _Program(
        "prefixpool-worker inspect",
        "What sizing must know of a model's files, as one JSON document. The operator runs it as a Job.",
        inspection_settings.InspectionSettings,
        inspection_settings.PREFIX,
    ),
    _Program(
        "prefixpool-sim",
        "The simulated engine. A worker with `--engine sim` starts it; these settings go behind `--`.",
        sim_settings.SimSettings,
        sim_settings.ENV_PREFIX,
    ),
    _Program(
        "prefixpool-operator",
        "The operator. Several may run; one leads.",
        operator_settings.OperatorSettings,
        operator_settings.PREFIX,
    ),
)

_RESPONSE_HEADERS: Final = (
    (names.H_REPLICA, "the replica that answered"),
    (names.H_REASON, "why it was chosen: one of the words below"),
    (names.H_PREDICTED, "cached tokens that the router expected, fixed before the engine answered; on every answer"),
    (names.H_CACHED, "cached tokens as the engine counted them; on answers that are not streamed"),
    (names.H_REQUEST_ID, "the client's, or a new one; the same in the engine's log and in `explain`"),
)
_OPEN_PATHS: Final = (
    (
        names.PATH_HEALTH,
        "`GET`, `HEAD`: 200 while clients should come to this router, else 503: the rule of `/readyz` on the admin port, "
        "which says why. No body. For load balancers, which look at the port that they send clients to",
    ),
)
_REQUEST_HEADERS: Final = (
    (names.H_POLICY, "routing policy for this request, where the pool allows it"),
    (names.H_SESSION, "session for the `session` policy; never reaches the engine"),
    (names.H_REQUEST_ID, "kept end to end"),
)


def pages() -> Mapping[str, str]:
    """File name -> Markdown."""
    return {
        "settings.md": _settings(),
        "metrics.md": _metrics(),
        "headers.md": _headers(),
        "inferencepool.md": f"{_MADE}\n{page.page()}",
    }


def _settings() -> str:
    lines = [
        _MADE,
        "# Settings",
        "",
        "Flags win over environment variables, which win over defaults. `list` settings may be repeated.",
    ]
    for program in _PROGRAMS:
        lines += ["", f"## {program.command}", "", program.about, "", "| flag | environment | type | default | what |"]
        lines.append("|---|---|---|---|---|")
        for option in core_settings.options(program.settings, program.prefix):
            default = "required" if option.required else f"`{option.default}`" if option.default else ""
            kind = option.type_name.replace("|", "\\|")
            what = option.description.replace("|", "\\|")
            lines.append(f"| `{option.flag}` | `{option.env}` | {kind} | {default} | {what} |")
    return "\n".join(lines) + "\n"


def _metrics() -> str:
    router, agent, operator = CollectorRegistry(), CollectorRegistry(), CollectorRegistry()
    RoutingMetrics(router)
    EdgeMetrics(router)
    AgentMetrics(agent)
    OperatorMetrics(operator)
    lines = [
        _MADE,
        "# Metrics",
        "",
        "Counters end in `_total` on the wire. Labels are bounded: members of the pool, or enums.",
    ]
    parts = (("Router (admin port, `/metrics`)", router), ("Agent (`/metrics`)", agent), ("Operator (`/metrics`)", operator))
    for title, registry in parts:
        lines += ["", f"## {title}", "", "| name | type | labels | what |", "|---|---|---|---|"]
        lines += sorted(_metric_row(metric) for metric in _declared(registry))
    return "\n".join(lines) + "\n"


def _declared(registry: CollectorRegistry) -> list[MetricWrapperBase]:
    # The public `collect()` leaves out label names of metrics without samples.
    return [metric for metric in registry._collector_to_names if isinstance(metric, MetricWrapperBase)]


def _metric_row(metric: MetricWrapperBase) -> str:
    labels = ", ".join(f"`{label}`" for label in metric._labelnames)
    return f"| `{metric._name}` | {metric._type} | {labels} | {metric._documentation} |"


def _headers() -> str:
    lines = [_MADE, "# Headers", "", "## Of answers", "", "| header | what |", "|---|---|"]
    lines += [f"| `{name}` | {what} |" for name, what in _RESPONSE_HEADERS]
    lines += ["", "## Of requests", "", "| header | what |", "|---|---|"]
    lines += [f"| `{name}` | {what} |" for name, what in _REQUEST_HEADERS]
    lines += [
        "",
        "## Paths that need no key",
        "",
        "On the router's port for clients. All others want a key where keys are set.",
        "",
    ]
    lines += ["| path | what |", "|---|---|"]
    lines += [f"| `{path}` | {what} |" for path, what in _OPEN_PATHS]
    lines += ["", "## Reasons", "", "`prefixpool explain` shows the numbers behind them.", ""]
    lines += ["| word | why that replica |", "|---|---|"]
    lines += [f"| `{reason}` | {what} |" for reason, what in WORDS.items()]
    return "\n".join(lines) + "\n"
