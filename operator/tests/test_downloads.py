"""Downloads reach people in Events and in Progressing: now and then, of the replica that is behind."""

from __future__ import annotations

from typing import Any

import pytest

from prefixpool.wire import Download, State
from prefixpool_operator.actions import Plan
from prefixpool_testing.agent_info import info
from prefixpool_testing.toy_cluster import ToyCluster, pool

GIB = 1 << 30
MODEL = "org/model"


def starting(replicas: int = 2, **spec: Any) -> ToyCluster:
    """All pods are there, none is ready, nothing was told yet."""
    cluster = ToyCluster(pool({"replicas": replicas, **spec}))
    cluster.run()
    for name in cluster.pods:
        cluster.set_ready(name, ready=False)
        cluster.infos[name] = info(name, state=State.STARTING)
    cluster.reconcile()
    return cluster


def at(cluster: ToyCluster, name: str, done: float, total: float = 8.0, **more: Any) -> None:
    download = Download(model=MODEL, done_bytes=int(done * GIB), total_bytes=int(total * GIB), **more)
    cluster.infos[name] = info(name, state=State.STARTING, download=download)


def messages(plan: Plan) -> list[str]:
    return [event.message for event in plan.events if event.reason == "Downloading"]


def test_a_step_is_one_event_and_the_conditions_message() -> None:
    cluster = starting()
    at(cluster, "chat-0", 3.3)
    told = "Downloading org/model on chat-0: 40 %, 3.2 GiB of 8.0 GiB."
    assert messages(cluster.reconcile()) == [told]
    assert cluster.condition("Progressing")["message"].endswith(told)
    assert cluster.said()["Progressing"].startswith("True")


def test_within_a_step_nothing_is_written() -> None:
    cluster = starting()
    at(cluster, "chat-0", 3.3)
    cluster.reconcile()
    at(cluster, "chat-0", 3.9)
    plan = cluster.plan()
    assert not plan.status_changed
    assert plan.events == ()
    assert plan.wake_after_s is not None


@pytest.mark.parametrize(("others", "words"), [((7.0, 7.9), "10 %"), ((0.1, 7.9), "0 %")])
def test_the_last_of_several_replicas_counts(others: tuple[float, float], words: str) -> None:
    cluster = starting(3)
    at(cluster, "chat-0", 0.9)
    for name, done in zip(("chat-1", "chat-2"), others, strict=True):
        at(cluster, name, done)
    (message,) = messages(cluster.reconcile())
    assert message.startswith(f"Downloading org/model on chat-0, chat-1, chat-2: {words}")


def test_a_whole_download_takes_a_dozen_events_at_most() -> None:
    cluster, told = starting(), []
    for percent in range(101):
        for name in ("chat-0", "chat-1"):
            at(cluster, name, percent * 0.08)
        told += messages(cluster.reconcile())
    assert len(told) == 11
    assert len(set(told)) == 11


def test_what_is_not_measured_yet_is_not_told() -> None:
    cluster = starting()
    at(cluster, "chat-0", 0, 0)
    assert messages(cluster.reconcile()) == []


def test_when_it_is_done_the_message_is_as_before() -> None:
    cluster = starting()
    before = cluster.condition("Progressing")["message"]
    at(cluster, "chat-0", 8)
    cluster.reconcile()
    cluster.infos["chat-0"] = info("chat-0", state=State.STARTING)
    cluster.reconcile()
    assert cluster.condition("Progressing")["message"] == before


def test_a_paused_pool_tells_it_once_as_well() -> None:
    cluster = starting(paused=False)
    cluster.pool["spec"]["paused"] = True
    at(cluster, "chat-0", 4)
    assert len(messages(cluster.reconcile())) == 1
    assert messages(cluster.reconcile()) == []
