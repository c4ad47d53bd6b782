"""Rollouts on a toy Kubernetes, whatever happens meanwhile: never fewer replicas than promised, no orphans, and an end."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from prefixpool_operator.actions import Plan
from prefixpool_operator.observed import Raw
from prefixpool_testing.agent_info import info
from prefixpool_testing.toy_cluster import SETTINGS, ToyCluster, pool

_ARGS = st.sampled_from(["--a", "--b", "--c", "--broken-1", "--broken-2"])


def _comes_up(pod: Raw) -> bool:
    """Pods of a bad spec do not."""
    return "broken" not in str(pod["spec"]["containers"])


class Rollouts(RuleBasedStateMachine):
    """People edit, pods come up or crash, the operator looks now and then."""

    @initialize(replicas=st.integers(1, 5), unavailable=st.integers(1, 3))
    def start(self, replicas: int, unavailable: int) -> None:
        self.replicas, self.unavailable = replicas, unavailable
        self.cluster = ToyCluster(pool({"replicas": replicas, "rollout": {"maxUnavailable": unavailable}}))
        self.cluster.run()
        self.image = 1
        self.planned: Plan | None = None

    def available(self) -> int:
        return sum(
            pod["status"]["conditions"][0]["status"] == "True" and "deletionTimestamp" not in pod["metadata"]
            for pod in self.cluster.pods.values()
        )

    @rule(arg=_ARGS)
    def edit(self, arg: str) -> None:
        self.cluster.edit_spec("kubectl", engine={"extraArgs": [arg]})

    @rule()
    def upgrade_router(self) -> None:
        self.image += 1
        self.cluster.settings = type(SETTINGS)(worker_image="other", router_image=f"router:{self.image}")

    @rule(looks=st.integers(1, 4), seen=st.booleans())
    def operator(self, looks: int, seen: bool) -> None:
        """Several times in a row, with or without Kubernetes doing anything between."""
        self.act()
        for _ in range(looks):
            self.cluster.reconcile()
            if seen:
                self.cluster.controllers()

    @rule()
    def look(self) -> None:
        """What is planned now is carried out later: the operator, too, may wait for a processor."""
        self.planned = self.planned or self.cluster.plan()

    @rule()
    def act(self) -> None:
        planned, self.planned = self.planned, None
        if planned is not None:
            self.cluster.carry_out(planned)

    @rule()
    def kubernetes(self) -> None:
        self.cluster.controllers()

    @rule(data=st.data())
    def kubelet(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.cluster.pods)))
        pod = self.cluster.pods[name]
        if "deletionTimestamp" in pod["metadata"]:
            self.cluster.end([name])
            self.cluster.controllers()
        elif _comes_up(pod):
            self.cluster.set_ready(name, not self._router_changes(pod))
            self.cluster.infos[name] = info(name, resident_blocks=data.draw(st.integers(0, 9)))
        else:
            self.cluster.crash(name)

    def _router_changes(self, pod: Raw) -> bool:
        """The kubelet stops the old router first; when it looks again the new one is up."""
        running = pod["status"].get("initContainerStatuses", [])
        return any(not one["containerID"].endswith(pod["spec"]["initContainers"][0]["image"]) for one in running)

    @invariant()
    def no_orphans(self) -> None:
        assert len(self.cluster.pods) <= self.replicas

    @invariant()
    def promise(self) -> None:
        """All pods that were ever up went down by the operator's hand only."""
        assert self.available() >= self.replicas - self.unavailable

    def teardown(self) -> None:
        if not hasattr(self, "cluster"):
            return
        self.act()
        self.cluster.edit_spec("kubectl", engine={"extraArgs": ["--good"]})
        self.cluster.run(200, comes_up=_comes_up)
        assert self.cluster.said()["Progressing"] == "False Settled"
        assert len(set(self.cluster.revisions().values())) == 1
        assert len(self.cluster.pods) == self.replicas


Rollouts.TestCase.settings = settings(max_examples=6, stateful_step_count=25, deadline=None)
TestRollouts: Any = Rollouts.TestCase
