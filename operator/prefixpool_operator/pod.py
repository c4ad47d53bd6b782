"""One pod of a pool as the plan sees it: what `plan()` reads of a raw Pod, and nothing else."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from prefixpool.wire import Info, State
from prefixpool_operator.identity import A_REVISION, A_ROUTER_BEFORE, A_ROUTER_IMAGE, L_COMPONENT
from prefixpool_operator.observed import Raw
from prefixpool_operator.render import router, worker
from prefixpool_operator.timestamp import seconds

A_RESTARTED: Final = "kubectl.kubernetes.io/restartedAt"  # what `kubectl rollout restart` leaves in a template
_FAILED_STARTS: Final = 2  # restarts of a container, or of an engine, after which one that is not up counts as broken


class Container(msgspec.Struct, frozen=True, kw_only=True):
    """State of one container."""

    name: str
    image: str = ""  # as the pod asks for it
    memory_limit: str = ""
    id: str = ""
    started: bool = False  # its startup probe has succeeded since its last start
    restarts: int = 0
    waiting: str = ""  # reason
    waiting_message: str = ""
    ended: str = ""  # reason of the last end: OOMKilled, Error, Completed
    ended_message: str = ""
    ended_code: int = 0
    ended_s: float = 0.0

    @property
    def crash_looping(self) -> bool:
        return self.waiting == "CrashLoopBackOff" or (self.restarts >= _FAILED_STARTS and not self.started)


class Pod(msgspec.Struct, frozen=True, kw_only=True):
    """A replica, a router or an inspection."""

    name: str
    uid: str
    component: str
    ordinal: int  # -1: none
    revision: str
    restarted_at: str
    router_before: str
    router_asked: str = ""  # image; "": as it stands in the container
    node: str
    ready: bool
    terminating_s: float | None  # when it should be gone
    unschedulable: str
    unmade_since_s: float | None = None  # on a node, but its volumes or its network are not there, hence no container either
    created_s: float
    bound_s: float = 0.0  # to its node; 0.0: not yet, or not known
    ended: bool = False  # for good (evicted, or a Job's that is done), and nobody asked it to
    containers: tuple[Container, ...]
    info: Info | None = None

    @property
    def worker(self) -> Container | None:
        return next((one for one in self.containers if one.name == worker.NAME), None)

    @property
    def router(self) -> Container | None:
        return next((one for one in self.containers if one.name == router.NAME), None)

    @property
    def available(self) -> bool:
        return self.ready and self.terminating_s is None

    @property
    def failing(self) -> bool:
        """Not up, and not about to be."""
        if self.ready:
            return False
        if self.info is not None and (self.info.state is State.FAILED or self.engine_storm):
            return True
        return any(one.crash_looping for one in self.containers)

    @property
    def starts_silently(self) -> bool:
        """Not ready, and only its agent, or an Event, would tell of a change."""
        runs = self.worker is not None and bool(self.worker.id) and not self.worker.waiting
        return not self.ready and (runs or self.unmade_since_s is not None)

    @property
    def ready_for_routers(self) -> bool:
        """Its engine answers, but the pod is not ready."""
        return not self.ready and self.terminating_s is None and self.info is not None and self.info.state is State.READY

    @property
    def broken(self) -> bool:
        """Serves nobody, and holds nothing that would be lost with it: it fails, or has not been up yet."""
        return not self.ready and (self.failing or not self.served)

    @property
    def served(self) -> bool:
        """Whether its engine has been up since the worker's container started."""
        return self.worker is not None and self.worker.started

    @property
    def engine_storm(self) -> bool:
        """The supervisor starts the engine again and again."""
        info = self.info
        return info is not None and info.restarts >= _FAILED_STARTS and info.state is State.STARTING

    @property
    def router_in_flight(self) -> bool:
        """Its router is about to be replaced in place: the container of the former image still runs."""
        former, _, image = self.router_before.partition(" ")
        return bool(former) and self.router is not None and self.router.id == former and self.router.image != image

    @property
    def router_runs(self) -> str:
        """Container and image, as `A_ROUTER_BEFORE` notes them; the image as it was before any patch of this container's."""
        if self.router is None or self.router_in_flight:
            return self.router_before
        return f"{self.router.id} {self.router.image}"

    @property
    def router_image(self) -> str:
        """As it was asked for, whatever admission made of that; "": no router."""
        return (self.router_asked or self.router.image) if self.router is not None else ""

    @property
    def value(self) -> tuple[int, int, int]:
        """What would be lost with its cache, for sorting; of equals, the last ordinal goes first."""
        info = self.info
        return (info.resident_blocks, info.boundaries, -self.ordinal) if info else (0, 0, -self.ordinal)


def read(raw: Raw, info: Info | None = None) -> Pod:
    """Tolerates what a kubelet has not filled in yet."""
    meta, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    annotations = meta.get("annotations") or {}
    ready, scheduled = _condition(status, "Ready"), _condition(status, "PodScheduled")
    deleted = meta.get("deletionTimestamp")
    return Pod(
        name=meta["name"],
        uid=meta["uid"],
        component=(meta.get("labels") or {}).get(L_COMPONENT, ""),
        ordinal=_ordinal(meta["name"]),
        revision=annotations.get(A_REVISION, ""),
        restarted_at=annotations.get(A_RESTARTED, ""),
        router_before=annotations.get(A_ROUTER_BEFORE, ""),
        router_asked=annotations.get(A_ROUTER_IMAGE, ""),
        node=spec.get("nodeName") or "",
        ready=ready.get("status") == "True",
        terminating_s=seconds(deleted) if deleted else None,
        unschedulable=_unschedulable(scheduled),
        unmade_since_s=None if deleted or not spec.get("nodeName") else _unmade_since_s(status),
        created_s=seconds(meta["creationTimestamp"]) if meta.get("creationTimestamp") else 0.0,
        bound_s=_bound_s(scheduled),
        ended=not deleted and status.get("phase") in ("Succeeded", "Failed"),
        containers=(
            *_containers(spec.get("initContainers"), status.get("initContainerStatuses")),
            *_containers(spec.get("containers"), status.get("containerStatuses")),
        ),
        info=info,
    )


def _ordinal(name: str) -> int:
    last = name.rpartition("-")[2]
    return int(last) if last.isdigit() else -1


def _condition(status: Raw, kind: str) -> Raw:
    found: Raw = next((one for one in status.get("conditions") or () if one.get("type") == kind), {})
    return found


def _unschedulable(scheduled: Raw) -> str:
    if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
        return scheduled.get("message") or "no node fits"
    return ""


def _bound_s(scheduled: Raw) -> float:
    stamp = scheduled.get("lastTransitionTime") if scheduled.get("status") == "True" else None
    return seconds(stamp) if stamp else 0.0


def _unmade_since_s(status: Raw) -> float | None:
    found = _condition(status, "PodReadyToStartContainers")
    if found.get("status") != "False":
        return None
    return seconds(found["lastTransitionTime"]) if found.get("lastTransitionTime") else 0.0


def _containers(specs: Any, statuses: Any) -> list[Container]:
    found = {one["name"]: one for one in statuses or ()}
    return [_container(one, found.get(one["name"], {})) for one in specs or ()]


def _container(asked: Raw, found: Raw) -> Container:
    state, last = found.get("state") or {}, found.get("lastState") or {}
    waiting = state.get("waiting") or {}
    ended = state.get("terminated") or last.get("terminated") or {}
    limits = (asked.get("resources") or {}).get("limits") or {}
    return Container(
        name=asked["name"],
        image=asked.get("image") or "",
        memory_limit=str(limits.get("memory", "")),
        id=found.get("containerID") or "",
        started=bool(found.get("started")),
        restarts=found.get("restartCount") or 0,
        waiting=waiting.get("reason") or "",
        waiting_message=waiting.get("message") or "",
        ended=ended.get("reason") or "",
        ended_message=ended.get("message") or "",
        ended_code=ended.get("exitCode") or 0,
        ended_s=seconds(ended["finishedAt"]) if ended.get("finishedAt") else 0.0,
    )
