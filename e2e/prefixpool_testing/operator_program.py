"""Operators as programs beside an API server, with the rights that the project ships, and a kubelet of paper."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import yaml
from kubernetes.aio import config
from kubernetes.aio.client import Configuration
from prometheus_client.parser import text_string_to_metric_families

from prefixpool.api import crd
from prefixpool_cli.claims import Claims
from prefixpool_cli.ports import claim_ports
from prefixpool_operator import kube
from prefixpool_operator.identity import L_COMPONENT, L_POOL
from prefixpool_operator.kube_client import KubeClient
from prefixpool_operator.observed import Raw
from prefixpool_testing.cluster.api_server import ApiServer
from prefixpool_testing.eventually import eventually

NAMESPACE: Final = "prefixpool-system"
ACCOUNT: Final = "prefixpool-operator"
RULES: Final = Path(__file__).parents[2] / "charts/prefixpool/files/operator-rules.yaml"
_IMAGES: Final = ("--worker-image", "worker:1", "--router-image", "router:1")


def install(api: ApiServer, *, account: str = ACCOUNT, namespaces: Sequence[str] = ()) -> None:
    """The CRD, and a ServiceAccount with the shipped rules: everywhere, or in these namespaces and then not for nodes."""
    rules = yaml.safe_load(RULES.read_text())
    subject = {"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}
    objects: list[Raw] = [
        crd.definition(),
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": account, "namespace": NAMESPACE}},
        *_granted(subject, "leadership", rules["leadership"], NAMESPACE),
    ]
    for place in namespaces or ("",):
        for name in ("pools", "routers") if place else ("pools", "routers", "nodes"):
            objects += _granted(subject, name, rules[name], place)
    api.apply(*objects)
    api.until_established(crd.definition()["metadata"]["name"])


def _granted(subject: Raw, name: str, rules: Any, namespace: str) -> list[Raw]:
    """A Role, or without namespace a ClusterRole, and its binding."""
    kind, group = "Role" if namespace else "ClusterRole", "rbac.authorization.k8s.io"
    meta = {"name": f"{subject['name']}-{name}", **({"namespace": namespace} if namespace else {})}
    head = {"apiVersion": f"{group}/v1", "metadata": meta}
    reference = {"apiGroup": group, "kind": kind, "name": meta["name"]}
    return [
        {**head, "kind": kind, "rules": rules},
        {**head, "kind": f"{kind}Binding", "roleRef": reference, "subjects": [subject]},
    ]


class OperatorProgram:
    """One `prefixpool-operator`. Ends with the API server at the latest."""

    def __init__(
        self, api: ApiServer, name: str = "operator", *flags: str, account: str = ACCOUNT, kubeconfig: Path | None = None
    ) -> None:
        self._api = api
        self.name = name
        self._flags = flags
        self._kubeconfig = kubeconfig or api.kubeconfig_of(account, NAMESPACE)
        self._claims = Claims()
        (self._port,) = claim_ports(self._claims, 1)

    def start(self) -> None:
        """Returns before it leads."""
        flags = (*_IMAGES, "--namespace", NAMESPACE, "--port", str(self._port), "--log-format", "json", *self._flags)
        command = [sys.executable, "-m", "prefixpool_operator.main", *flags]
        self._api.programs.start(self.name, command, {"KUBECONFIG": str(self._kubeconfig)})

    def stop(self) -> None:
        """In order."""
        self._api.programs.stop(self.name)

    def kill(self) -> None:
        """SIGKILL."""
        self._api.programs.kill(self.name)

    def pause(self) -> None:
        """SIGSTOP: it does nothing, and does not know."""
        self._api.programs.signal(self.name, signal.SIGSTOP)

    def go_on(self) -> None:
        self._api.programs.signal(self.name, signal.SIGCONT)

    def pid(self) -> int:
        return self._api.programs.pid(self.name)

    def exit_status(self) -> int | None:
        """None while it runs."""
        return self._api.programs.exit_status(self.name)

    @property
    def log(self) -> str:
        return (self._api.programs.folder / f"{self.name}.log").read_text()

    @property
    def tail(self) -> str:
        """End of its log."""
        return self._api.programs.tail(self.name)

    async def until_leading(self) -> None:
        async def check() -> bool:
            return await self.figure("leader") == 1 and (await self._ask("/readyz"))[0] == 200

        await eventually(check, within_s=60, what=f"{self.name} leads")

    async def figure(self, name: str, **labels: str) -> float:
        """A metric, summed over the labels that are not given. -1: the process does not answer."""
        status, text = await self._ask("/metrics")
        if status != 200:
            return -1
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == f"prefixpool_operator_{name}" and labels.items() <= sample.labels.items()
        )

    async def _ask(self, path: str) -> tuple[int, str]:
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session,
                session.get(f"http://127.0.0.1:{self._port}{path}") as answer,
            ):
                return answer.status, await answer.text()
        except (aiohttp.ClientError, TimeoutError):
            return 0, ""


async def admin_client(api: ApiServer) -> KubeClient:
    """All rights."""
    configuration = Configuration()
    await config.load_kube_config(str(api.kubeconfig), client_configuration=configuration)  # type: ignore[no-untyped-call]
    return KubeClient(configuration, timeout_s=30, user_agent="test")


class PaperKubelet:
    """Says of pods what a kubelet would; runs none."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client

    async def run_pods(self, namespace: str, pool: str, *, address: str = "") -> int:
        """Every pod of the pool becomes ready; how many there are."""
        pods = await self._client.list_all(kube.POD, namespace, labels=f"{L_POOL}={pool}")
        told = [(pod, ready_status(pod, address)) for pod in pods]
        # Of what is known already nothing is said: tests look often, and each word is work for an API server.
        await asyncio.gather(*(self.say(pod, status) for pod, status in told if not _covers(pod.get("status"), status)))
        return len(pods)

    async def say(self, pod: Raw, status: Mapping[str, Any]) -> None:
        """As the pod's status. A pod that is gone is no error."""
        meta = pod["metadata"]
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": {k: meta[k] for k in ("name", "namespace", "uid")}}
        try:
            await self._client.apply(kube.POD, {**body, "status": status}, manager="kubelet", subresource="status")
        except (kube.NotFoundError, kube.ConflictError):
            return


def ready_status(pod: Raw, address: str = "") -> Raw:
    """All containers run."""
    spec = pod["spec"]
    now = "2026-01-01T00:00:00Z"

    def running(container: Raw) -> Raw:
        state = {"running": {"startedAt": now}}
        image = container["image"]
        return {
            "name": container["name"],
            "ready": True,
            "started": True,
            "restartCount": 0,
            "image": image,
            "imageID": image,
            "containerID": f"paper://{pod['metadata']['uid']}/{container['name']}/{image}",
            "state": state,
        }

    conditions = ("PodScheduled", "Initialized", "ContainersReady", "Ready")
    return {
        "phase": "Running",
        "startTime": now,
        "conditions": [{"type": name, "status": "True", "lastTransitionTime": now} for name in conditions],
        "containerStatuses": [running(container) for container in spec["containers"]],
        "initContainerStatuses": [running(container) for container in spec.get("initContainers", ())],
        **({"podIP": address, "podIPs": [{"ip": address}]} if address else {}),
    }


def _covers(found: Any, wanted: Any) -> bool:
    """Whether all that is `wanted` was `found`, defaults of the API server apart."""
    if isinstance(wanted, Mapping):
        return isinstance(found, Mapping) and all(_covers(found.get(key), value) for key, value in wanted.items())
    if isinstance(wanted, list):
        return isinstance(found, list) and len(found) == len(wanted) and all(map(_covers, found, wanted))
    return bool(found == wanted)


def worker_pods(pods: list[Raw]) -> list[Raw]:
    return [pod for pod in pods if pod["metadata"]["labels"].get(L_COMPONENT) == "worker"]
