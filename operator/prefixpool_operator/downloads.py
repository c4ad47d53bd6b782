"""Models on their way from the Hub, as agents tell it: in coarse steps, so that a status is written now and then. Pure."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from prefixpool.api.status import ConditionStatus, ConditionType
from prefixpool.downloading import amount, step
from prefixpool.listing import listed
from prefixpool_operator.actions import Event, EventType
from prefixpool_operator.conditions import Verdict
from prefixpool_operator.view import View

_STEPS: Final = 10
_SHOWN: Final = 5  # names of replicas


def told(view: View) -> str:
    """Of the one that is behind all others; replicas that share a cache are equally far. "": nothing is downloaded."""
    going = {
        pod.name: pod.info.download
        for pod in view.workers
        if pod.info is not None and pod.info.download is not None and pod.info.download.total_bytes
    }
    if not going:
        return ""
    last = min(going.values(), key=lambda one: (step(one, _STEPS), -one.total_bytes))
    return f"Downloading {last.model} on {listed(tuple(going), _SHOWN)}: {amount(last, _STEPS)}."


def with_download(progressing: Verdict, view: View) -> Verdict:
    """Progressing, with how far downloads are."""
    text = told(view) if progressing.status is ConditionStatus.TRUE else ""
    return replace(progressing, message=f"{progressing.message} {text}") if text else progressing


def events(view: View, progressing: Verdict) -> list[Event]:
    """One for each step: what the status said before is not told again."""
    text, before = told(view), view.before.condition(ConditionType.PROGRESSING) if view.before else None
    new = text and text in progressing.message and (before is None or text not in before.message)
    return [Event(type=EventType.NORMAL, reason="Downloading", message=text)] if new else []
