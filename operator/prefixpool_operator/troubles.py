"""What needs a person: found in pods, nodes and claims, and told with what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Final

import msgspec

from prefixpool.api.quantity import Bytes
from prefixpool.api.status import Reason
from prefixpool.listing import listed
from prefixpool.sizing.reasons import gib
from prefixpool.wire import Mode, State
from prefixpool_operator import hindrances
from prefixpool_operator.actions import FIELD_MANAGER
from prefixpool_operator.observed import Node
from prefixpool_operator.pod import Container, Pod
from prefixpool_operator.render import worker
from prefixpool_operator.timestamp import seconds
from prefixpool_operator.view import View

OOM_TOLD_S: Final = 600.0  # a pod that recovered from an out-of-memory kill is told of for so long
STUCK_S: Final = 30.0  # beyond its grace period
LOOK_S: Final = 30.0  # between two looks at what no watch tells of
_NODES_S: Final = 120.0  # in which a node that just joined is known, and known to be ready: nodes are read now and then
_PODS_S: Final = 60.0  # in which a StatefulSet that was written has pods, and a pod on a node has its volumes
_TEXT: Final = 300  # characters of another program's message
_SHOWN: Final = 5  # names of pods in a message
_IMAGE: Final = frozenset(
    ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError", "RegistryUnavailable")
)


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of it, with the pods that have it."""

    reason: Reason
    message: str  # behind the names of the pods
    pods: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{listed(self.pods, _SHOWN)}: {self.message}" if self.pods else self.message


class Deadline(msgspec.Struct, frozen=True, kw_only=True):
    """Something may become a trouble, or cease to be one, at this time."""

    at_s: float


def look(view: View) -> tuple[list[Trouble], list[Deadline]]:
    """The worst first; pods with the same trouble together."""
    found: dict[tuple[Reason, str], list[str]] = {}
    deadlines: list[Deadline] = []
    told = ((pod.name, one) for pod in view.pods for one in _of_pod(pod, view))
    for name, one in chain(told, (("", one) for one in _refused(view))):
        if isinstance(one, Deadline):
            deadlines.append(one)
        else:
            found.setdefault((one.reason, one.message), []).extend([name] if name else [])
    troubles = [
        Trouble(reason=reason, message=message, pods=tuple(sorted(names))) for (reason, message), names in found.items()
    ]
    return sorted(troubles, key=lambda one: (_SEVERITY.index(one.reason), one.pods)), deadlines


def _refused(view: View) -> Iterator[Trouble | Deadline]:
    """Pods that may not be made. Where Events may not be read, it shows as a StatefulSet that stays without any."""
    if view.stateful is None or len(view.workers) >= view.replicas_now:
        return
    yield Deadline(at_s=view.now_s + LOOK_S)
    made_s = max((pod.created_s for pod in view.workers), default=0.0)  # what was refused before that is over
    if said := hindrances.said(view.warnings, view.stateful["metadata"]["uid"], made_s):
        yield Trouble(reason=Reason.POD_REFUSED, message=f"pods cannot be made: {_short(said)}")
        return
    if view.workers or view.before is None or view.before.replicas:
        return
    written = [
        seconds(entry["time"])
        for entry in view.stateful["metadata"].get("managedFields") or ()
        if entry.get("manager") == FIELD_MANAGER and entry.get("time")
    ]
    if not written:
        return
    due_s = max(written) + _PODS_S
    if view.now_s < due_s:
        return
    told = f"`kubectl describe statefulset {view.identity.name}` says why"
    yield Trouble(
        reason=Reason.POD_REFUSED, message=f"no pod can be made (a quota, pod security, an admission webhook): {told}"
    )


# The first one found becomes the condition's reason: causes before what follows from them.
_SEVERITY: Final = (
    Reason.POD_REFUSED,
    Reason.NODE_LOST,
    Reason.STUCK_TERMINATING,
    Reason.OUT_OF_MEMORY,
    Reason.DOWNLOAD_FAILED,
    Reason.CRASH_LOOPING,
    Reason.IMAGE_UNAVAILABLE,
    Reason.SECRET_MISSING,
    Reason.MOUNT_FAILED,
    Reason.CLAIM_PENDING,
    Reason.UNSCHEDULABLE,
    Reason.APPROXIMATE,
    Reason.DISK_TIER_FAILING,
)


def _of_pod(pod: Pod, view: View) -> Iterator[Trouble | Deadline]:
    node = _lost_node(pod, view.nodes)
    if pod.terminating_s is not None:
        yield from _terminating(pod, pod.terminating_s, node, view.now_s)
        return
    if pod.starts_silently:
        yield Deadline(at_s=view.now_s + LOOK_S)
    if node and not pod.ready and view.now_s >= pod.bound_s + _NODES_S:
        yield Trouble(
            reason=Reason.NODE_LOST, message=f"node {node} is not ready; Kubernetes evicts its pods after 5 minutes"
        )
        return
    if node and not pod.ready:
        yield Deadline(at_s=pod.bound_s + _NODES_S)
    if pod.unschedulable:
        claim = "persistentvolumeclaim" in pod.unschedulable.lower()
        reason = Reason.CLAIM_PENDING if claim else Reason.UNSCHEDULABLE
        yield Trouble(reason=reason, message=f"no node takes it: {_short(pod.unschedulable)}")
        return
    if pod.unmade_since_s is not None:
        yield from _unmade(pod, pod.unmade_since_s, view)
        return
    for container in pod.containers:
        yield from _of_container(pod, container, view.now_s)
    yield from _of_info(pod)


def _unmade(pod: Pod, since_s: float, view: View) -> Iterator[Trouble | Deadline]:
    """The kubelet waits for volumes, Secrets among them, and for the network, for ever and without another word."""
    said = hindrances.said(view.warnings, pod.uid, view.now_s - hindrances.RECENT_S)
    if not said and view.now_s < since_s + _PODS_S:
        yield Deadline(at_s=since_s + _PODS_S)
        return
    why = _short(said) or "`kubectl describe pod` says why (a Secret, ConfigMap or claim that is missing, or the network)"
    missing = any(word in said.lower() for word in ("secret", "configmap"))
    reason = Reason.SECRET_MISSING if missing else Reason.MOUNT_FAILED
    yield Trouble(reason=reason, message=f"its containers cannot be made: {why}")


def _lost_node(pod: Pod, nodes: Mapping[str, Node] | None) -> str:
    """Its name, if the pod's node is known to be gone or not ready."""
    if nodes is None or not pod.node:
        return ""
    node = nodes.get(pod.node)
    return "" if node is not None and node.ready else pod.node


def _terminating(pod: Pod, due_s: float, node: str, now_s: float) -> Iterator[Trouble | Deadline]:
    if now_s < due_s + STUCK_S:
        yield Deadline(at_s=due_s + STUCK_S)
    elif node:
        yield Trouble(
            reason=Reason.NODE_LOST,
            message=(
                f"cannot end, because node {node} is not ready, and is not replaced before that. Once the machine is surely "
                f"off: `kubectl taint node {node} node.kubernetes.io/out-of-service=nodeshutdown:NoExecute`, or "
                f"`kubectl delete pod {pod.name} --force --grace-period=0`"
            ),
        )
    else:
        yield Trouble(
            reason=Reason.STUCK_TERMINATING,
            message=(
                f"should have ended and has not, and is not replaced before that. Look for finalizers and for the "
                f"kubelet of node {pod.node or '(none)'}; if it surely does not run any more: "
                f"`kubectl delete pod {pod.name} --force --grace-period=0`"
            ),
        )


def _of_container(pod: Pod, container: Container, now_s: float) -> Iterator[Trouble | Deadline]:
    if container.waiting in _IMAGE:
        why = container.waiting_message.split("ErrImagePull: ")[-1]
        yield Trouble(reason=Reason.IMAGE_UNAVAILABLE, message=f"image {container.image} cannot be had: {_short(why)}")
    elif container.waiting == "CreateContainerConfigError":
        yield Trouble(
            reason=Reason.SECRET_MISSING, message=f"{container.name} cannot start: {_short(container.waiting_message)}"
        )
    elif container.ended == "OOMKilled" and not (pod.ready and now_s >= container.ended_s + OOM_TOLD_S):
        if pod.ready:
            yield Deadline(at_s=container.ended_s + OOM_TOLD_S)
        yield Trouble(reason=Reason.OUT_OF_MEMORY, message=_out_of_memory(container))
    elif container.crash_looping and not pod.ready:
        yield Trouble(reason=Reason.CRASH_LOOPING, message=f"{container.name} does not stay up: {_cause(container)}")


def _out_of_memory(container: Container) -> str:
    field = "spec.engine.resources" if container.name == worker.NAME else "spec.router.resources"
    other = ", or lower spec.kvCache.host.memory" if container.name == worker.NAME else ""
    limit = f"its limit of {_size(container.memory_limit)}" if container.memory_limit else "its node has left"
    return f"{container.name} was killed for using more memory than {limit}: raise {field}.limits.memory{other}"


def _size(quantity: str) -> str:
    try:
        return gib(Bytes.parse(quantity))
    except ValueError:
        return quantity


def _cause(container: Container) -> str:
    if container.ended_message.strip():
        return f"{_short(container.ended_message.strip().splitlines()[-1])} (exit code {container.ended_code})"
    return f"it ends with exit code {container.ended_code}; `kubectl logs --previous -c {container.name}` tells more"


def _of_info(pod: Pod) -> Iterator[Trouble]:
    info = pod.info
    if info is None:
        return
    if info.download is not None and info.download.problem:
        told = f"{info.download.model} does not come: {_short(info.download.problem)}"
        yield Trouble(reason=Reason.DOWNLOAD_FAILED, message=told)
    if info.state is State.FAILED:
        why = _short(info.reason) or "no reason given"
        told = f"the engine was given up: {why}. Change what it complains of in the spec, or delete the pod to try again"
        yield Trouble(reason=Reason.CRASH_LOOPING, message=told)
    elif pod.engine_storm:
        yield Trouble(reason=Reason.CRASH_LOOPING, message=f"the engine does not stay up: {_short(info.reason)}")
    elif info.state is State.READY and info.mode is Mode.APPROXIMATE and pod.ready:
        yield Trouble(reason=Reason.APPROXIMATE, message=f"its cache is not known exactly: {_short(info.reason)}")
    if info.disk is not None and pod.ready:
        told = f"its disk tier fails, so that it computes what it should have kept: {_short(info.disk.words)}"
        yield Trouble(reason=Reason.DISK_TIER_FAILING, message=f"{told}. `prefixpool doctor` says what to do")


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _TEXT else f"{line[: _TEXT - 1]}…"
