"""One look at a pool: what is wanted beside what is there, for verdicts and status."""

from __future__ import annotations

import msgspec

from prefixpool.api.status import PoolStatus
from prefixpool_operator.identity import Component, Identity
from prefixpool_operator.observed import Node, Observed, Raw
from prefixpool_operator.pod import Pod, read
from prefixpool_operator.rollout import Target


class View(msgspec.Struct, frozen=True, kw_only=True):
    """Without pods that have ended for good (evicted, or done): their controllers replace them."""

    identity: Identity
    before: PoolStatus | None
    pods: tuple[Pod, ...]
    nodes: dict[str, Node] | None
    stateful: Raw | None
    deployment: Raw | None
    warnings: tuple[Raw, ...]
    refused: str
    now_s: float

    @classmethod
    def of(cls, observed: Observed) -> View:
        identity = Identity.of(observed.pool)
        pods = (read(raw, observed.infos.get(raw["metadata"]["name"])) for raw in observed.pods)
        return cls(
            identity=identity,
            before=PoolStatus.from_object(observed.pool),
            pods=tuple(pod for pod in pods if not pod.ended),
            nodes=None if observed.nodes is None else {node.name: node for node in observed.nodes},
            stateful=observed.children.get(("StatefulSet", identity.name)),
            deployment=observed.children.get(("Deployment", identity.router)),
            warnings=observed.warnings,
            refused=observed.refused,
            now_s=observed.now_s,
        )

    @property
    def workers(self) -> tuple[Pod, ...]:
        return tuple(pod for pod in self.pods if pod.component == Component.WORKER and pod.ordinal >= 0)

    @property
    def replicas_now(self) -> int:
        """As the StatefulSet was last told."""
        return int(self.stateful["spec"].get("replicas", 0)) if self.stateful else 0

    def ready(self, replicas: int) -> int:
        return sum(pod.available for pod in self.workers if pod.ordinal < replicas)

    def updated(self, target: Target | None) -> int:
        """Replicas that are as the spec wants them."""
        if target is None:
            return 0
        return sum(
            target.updated(pod) for pod in self.workers if pod.ordinal < target.replicas and pod.terminating_s is None
        )

    @property
    def templates_seen(self) -> bool:
        """Whether Kubernetes makes pods of the present template."""
        return all(_seen(one) for one in (self.stateful, self.deployment) if one is not None)

    @property
    def routers_settled(self) -> bool:
        """Routers of their own, if there are any."""
        if self.deployment is None:
            return True
        asked, status = self.deployment["spec"].get("replicas", 1), self.deployment.get("status") or {}
        counts = (status.get(name, 0) for name in ("replicas", "updatedReplicas", "readyReplicas"))
        return all(count == asked for count in counts)

    @property
    def routers_ready(self) -> int:
        return int(((self.deployment or {}).get("status") or {}).get("readyReplicas", 0))


def _seen(workload: Raw) -> bool:
    return bool((workload.get("status") or {}).get("observedGeneration", 0) >= workload["metadata"].get("generation", 0))
