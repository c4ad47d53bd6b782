"""One pool on a Kubernetes of dicts: just enough of API server, StatefulSet controller and kubelet to carry out plans.

Deterministic and without time of its own. The real ones are tested against in `e2e/apiserver` and `e2e/cluster`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable
from typing import Any

from prefixpool.wire import Info
from prefixpool_operator.actions import FIELD_MANAGER, Action, Apply, CreateOnce, Delete, FillReplicas, PatchImage, Plan
from prefixpool_operator.identity import A_REVISION, L_COMPONENT, key_of
from prefixpool_operator.observed import Key, Node, Observed, Raw, Settings
from prefixpool_operator.plan import plan
from prefixpool_operator.render import router

NOW = 1_800_000_000.0
STAMP = "2027-01-15T08:00:00Z"  # the same moment
SETTINGS = Settings(worker_image="registry.local/worker:1", router_image="registry.local/router:1")


def pool(spec: Raw | None = None, name: str = "chat") -> Raw:
    """A small pool on CPUs of a model that the catalogue has."""
    return {
        "apiVersion": "prefixpool.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": name, "namespace": "default", "uid": "pool-uid", "generation": 1, "managedFields": []},
        "spec": {
            "model": {"source": "HuggingFaceTB/SmolLM2-135M-Instruct"},
            "accelerator": {"resource": "cpu", "memory": "4.5Gi"},
            **(spec or {}),
        },
    }


class ToyCluster:
    """`children`, `pods` and `pool` may be changed by tests as anybody could change them in a cluster."""

    def __init__(
        self, obj: Raw | None = None, *, settings: Settings = SETTINGS, nodes: tuple[Node, ...] | None = None
    ) -> None:
        self.pool = obj or pool()
        self.children: dict[Key, Raw] = {}
        self.pods: dict[str, Raw] = {}
        self.claims: list[Raw] = []
        self.infos: dict[str, Info] = {}
        self.taken: set[Key] = set()
        self.warnings: list[Raw] = []
        self.refused = ""
        self.nodes = nodes
        self.settings = settings
        self.now_s = NOW
        self._applied: dict[Key, Raw] = {}
        self._uids = 0

    # The operator

    def observe(self) -> Observed:
        return Observed(
            pool=copy.deepcopy(self.pool),
            children=copy.deepcopy(self.children),
            taken=frozenset(self.taken),
            pods=tuple(copy.deepcopy(list(self.pods.values()))),
            claims=tuple(copy.deepcopy(self.claims)),
            nodes=self.nodes,
            infos=dict(self.infos),
            warnings=tuple(copy.deepcopy(self.warnings)),
            refused=self.refused,
            now_s=self.now_s,
            settings=self.settings,
        )

    def plan(self) -> Plan:
        """Without carrying it out."""
        return plan(self.observe())

    def reconcile(self) -> Plan:
        """Plan, act, write status."""
        found = self.plan()
        self.carry_out(found)
        return found

    def carry_out(self, found: Plan) -> None:
        """What was planned, perhaps a while ago."""
        for action in found.actions:
            self._do(action)
        if found.status_changed:
            self.pool["status"] = json.loads(json.dumps(found.status))

    def _do(self, action: Action) -> None:
        match action:
            case Apply():
                self._apply(action.object)
            case CreateOnce():
                obj = copy.deepcopy(action.object)
                obj["metadata"]["uid"] = self._uid()
                self.children.setdefault(key_of(obj), {**obj, "data": dict.fromkeys(action.random_keys, "")})
            case Delete(kind="Pod"):
                if action.name in self.pods and self.pods[action.name]["metadata"]["uid"] == action.uid:
                    self.terminate(action.name)
            case Delete():
                self.children.pop((action.kind, action.name), None)
            case PatchImage():
                self._patch_image(action)
            case FillReplicas():
                self.edit_spec(FIELD_MANAGER, replicas=action.replicas)

    def _apply(self, obj: Raw) -> None:
        before = self.children.get(key_of(obj))
        after = _merged(before, self._applied.get(key_of(obj)), obj)
        self._applied[key_of(obj)] = copy.deepcopy(obj)
        meta = after["metadata"]
        meta.setdefault("uid", self._uid())
        changed = before is None or before.get("spec") != after.get("spec")
        meta["generation"] = (before["metadata"]["generation"] if before else 0) + changed
        self.children[key_of(obj)] = after

    def _patch_image(self, action: PatchImage) -> None:
        pod = self.pods.get(action.pod)
        if pod is None or pod["metadata"]["uid"] != action.uid:
            return
        pod["metadata"]["annotations"].update(action.annotations)
        for container in pod["spec"]["initContainers"]:
            if container["name"] == action.container:
                container["image"] = action.image

    def _uid(self) -> str:
        self._uids += 1
        return f"uid-{self._uids}"

    # People

    def edit_spec(self, manager: str, **fields: Any) -> None:
        """As `kubectl apply`, by this field manager; None removes a field."""
        for name, value in fields.items():
            self.pool["spec"].pop(name, None)
            if value is not None:
                self.pool["spec"][name] = value
            for entry in self.pool["metadata"]["managedFields"]:
                entry["fieldsV1"]["f:spec"].pop(f"f:{name}", None)
        owned: Raw = {f"f:{name}": {} for name, value in fields.items() if value is not None}
        entry = {"manager": manager, "operation": "Apply", "time": STAMP, "fieldsV1": {"f:spec": owned}}
        self.pool["metadata"]["managedFields"].append(entry)
        self.pool["metadata"]["generation"] += 1

    def edit(self, kind: str, name: str, change: Callable[[Raw], None], manager: str = "kubectl-edit") -> None:
        """A foreign edit of a child."""
        child = self.children[kind, name]
        change(child)
        child["metadata"].setdefault("managedFields", []).append({"manager": manager, "operation": "Update", "time": STAMP})

    # Kubernetes

    def controllers(self) -> None:
        """StatefulSet and Deployment: missing pods are made of the present template, surplus ones end."""
        for (kind, _), child in self.children.items():
            if kind in ("StatefulSet", "Deployment"):
                child.setdefault("status", {})["observedGeneration"] = child["metadata"]["generation"]
        stateful = self.stateful
        if stateful is None:
            return
        replicas = stateful["spec"]["replicas"]
        for ordinal in range(replicas):
            name = f"{stateful['metadata']['name']}-{ordinal}"
            if name not in self.pods:
                self.pods[name] = self._pod(name, stateful)
        for name in list(self.pods):
            if name.rpartition("-")[2].isdigit() and int(name.rpartition("-")[2]) >= replicas:
                self.terminate(name)

    @property
    def stateful(self) -> Raw | None:
        return self.children.get(("StatefulSet", self.pool["metadata"]["name"]))

    def _pod(self, name: str, stateful: Raw) -> Raw:
        template = copy.deepcopy(stateful["spec"]["template"])
        uid = self._uid()
        return {
            "metadata": {
                "name": name,
                "namespace": "default",
                "uid": uid,
                "labels": template["metadata"]["labels"],
                "annotations": dict(template["metadata"].get("annotations") or {}),
                "creationTimestamp": STAMP,
            },
            "spec": {**template["spec"], "nodeName": "node-1"},
            "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "False"}]},
        }

    def set_ready(self, name: str, ready: bool = True) -> None:
        """All its containers run (or, for False, its probes fail)."""
        pod = self.pods[name]
        status = pod["status"]
        status["conditions"] = [{"type": "Ready", "status": str(ready)}]
        for specs, statuses in (("initContainers", "initContainerStatuses"), ("containers", "containerStatuses")):
            status[statuses] = [
                {
                    "name": one["name"],
                    "started": True,
                    "restartCount": 0,
                    "containerID": f"{pod['metadata']['uid']}/{one['image']}",
                    "state": {"running": {"startedAt": STAMP}},
                }
                for one in pod["spec"].get(specs, ())
            ]

    def crash(self, name: str, container: str = "worker", **ended: Any) -> None:
        """One container ends again and again."""
        state = {"reason": "Error", "exitCode": 1, "finishedAt": STAMP, **ended}
        status = {
            "name": container,
            "started": False,
            "restartCount": 5,
            "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s"}},
            "lastState": {"terminated": state},
        }
        self.pods[name]["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
        key = "initContainerStatuses" if container == router.NAME else "containerStatuses"
        self.pods[name]["status"][key] = [status]

    def wait_for(self, name: str, reason: str, message: str, container: str = "worker") -> None:
        """A container that cannot start."""
        status = {"name": container, "started": False, "state": {"waiting": {"reason": reason, "message": message}}}
        self.pods[name]["status"]["containerStatuses"] = [status]

    def unmake(self, name: str) -> None:
        """Its volumes or its network are not there."""
        made = {"type": "PodReadyToStartContainers", "status": "False", "lastTransitionTime": STAMP}
        self.pods[name]["status"] = {"phase": "Pending", "conditions": [made]}

    def warn(self, obj: Raw, message: str, *, reason: str = "Failed", stamp: str = STAMP) -> None:
        """An Event about an object."""
        subject = {"uid": obj["metadata"]["uid"]}
        event = {"metadata": {}, "involvedObject": subject, "reason": reason, "message": message, "lastTimestamp": stamp}
        self.warnings.append(event)

    def terminate(self, name: str) -> None:
        self.pods[name]["metadata"].setdefault("deletionTimestamp", STAMP)

    def end(self, names: Iterable[str] | None = None) -> None:
        """Terminating pods are gone."""
        for name in list(names if names is not None else self.pods):
            if "deletionTimestamp" in self.pods[name]["metadata"]:
                del self.pods[name]
                self.infos.pop(name, None)

    def run(self, rounds: int = 40, *, comes_up: Callable[[Raw], bool] = lambda pod: True) -> int:
        """Everybody takes turns until nothing happens; the number of rounds. AssertionError if that never is."""
        for number in range(rounds):
            before = (copy.deepcopy(self.children), copy.deepcopy(self.pods), copy.deepcopy(self.pool))
            self.reconcile()
            self.end()
            self.controllers()
            for name, pod in self.pods.items():
                if comes_up(pod) and "deletionTimestamp" not in pod["metadata"]:
                    self.set_ready(name)
            if before == (self.children, self.pods, self.pool):
                return number
        raise AssertionError(f"not settled after {rounds} rounds: {self.condition('Progressing')}")

    # Looking

    def condition(self, kind: str) -> Raw:
        found: Raw = next(one for one in self.pool["status"]["conditions"] if one["type"] == kind)
        return found

    def said(self) -> dict[str, str]:
        """Condition → `status reason`."""
        return {one["type"]: f"{one['status']} {one['reason']}" for one in self.pool["status"]["conditions"]}

    def revisions(self) -> dict[str, str]:
        return {
            name: pod["metadata"]["annotations"][A_REVISION]
            for name, pod in self.pods.items()
            if pod["metadata"]["labels"][L_COMPONENT] == "worker"
        }


def _merged(before: Any, last: Any, ours: Any) -> Any:
    """As server-side apply: our fields as we say; what we set `last` and leave out now goes; lists are whole."""
    if not (isinstance(before, dict) and isinstance(ours, dict)):
        return copy.deepcopy(ours)
    mine = last if isinstance(last, dict) else {}
    kept = {name: value for name, value in before.items() if name in ours or name not in mine}
    whole = {name: value for name, value in ours.items() if name == "selector"}  # which the API server takes as one value
    return {**kept, **{name: _merged(before.get(name), mine.get(name), value) for name, value in ours.items()}, **whole}
