"""The product in a cluster as its chart installs it, and pools in namespaces that enforce the restricted profile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp

from prefixpool import names
from prefixpool_cli.admin import AdminClient
from prefixpool_operator import kube
from prefixpool_operator.kube_client import KubeClient
from prefixpool_operator.observed import Raw
from prefixpool_router.state import RouterReport
from prefixpool_testing import chart
from prefixpool_testing.cluster import images
from prefixpool_testing.cluster.kubectl import RESTRICTED
from prefixpool_testing.cluster.node import Node
from prefixpool_testing.eventually import eventually
from prefixpool_testing.operated import LOOK_S, POOLS, Place
from prefixpool_testing.operator_program import admin_client, worker_pods
from prefixpool_testing.pool_client import PoolClient
from prefixpool_testing.sim_pool import samples

OPERATOR: Final = "deployment/prefixpool-operator"
MODEL: Final = "SmolLM2-135M-Instruct"  # what the pools of the tests serve
POOL_S: Final = 180.0  # pods start on a busy machine
_SERVICE: Final = kube.Resource("v1", "Service", "services")


def install(cluster: Node, router: str = images.CONTROL) -> None:
    """Operators with images of this checkout; ready. Again: an upgrade."""
    install_objects(cluster, chart.objects(values(router)))


def install_objects(cluster: Node, rendered: Iterable[Raw]) -> None:
    """What a chart rendered, but for its test; operators are ready."""
    api = cluster.api
    sent = [one for one in rendered if "helm.sh/hook" not in one["metadata"].get("annotations", {})]
    api.make_namespaces(chart.NAMESPACE, labels=RESTRICTED)
    api.apply(*sent)
    api.kubectl("-n", chart.NAMESPACE, "rollout", "status", OPERATOR, "--timeout=120s")


def values(router: str = images.CONTROL) -> Raw:
    """Of the chart, for images of this checkout."""
    return {
        "image": _image(images.CONTROL),
        "router": {"image": _image(router)},
        "worker": {"image": _image(images.WORKER)},
    }


def _image(name: str) -> dict[str, str]:
    repository, _, tag = name.rpartition(":")
    return {"repository": repository, "tag": tag}


class PoolPlace(Place):
    """A namespace of one test, with pods that run."""

    def __init__(self, cluster: Node, client: KubeClient, http: aiohttp.ClientSession) -> None:
        super().__init__(cluster.api, client)
        self.cluster = cluster
        self._http = http
        self.api.make_namespaces(self.namespace, labels=RESTRICTED)
        self.api.apply(self._tests_may_enter())

    def _tests_may_enter(self) -> Raw:
        """What pools let in is their own NetworkPolicy's to say; beside it, this one lets in the tests, from outside."""
        machine = self.cluster.network.machine_address
        return {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": "tests", "namespace": self.namespace},
            "spec": {"podSelector": {}, "ingress": [{"from": [{"ipBlock": {"cidr": f"{machine}/32"}}]}]},
        }

    def remove(self) -> None:
        """The namespace with all that is in it, which takes as long as pods take to drain."""
        own = ("-n", self.namespace)
        self.api.kubectl(*own, "delete", POOLS, "--all", "--timeout=100s")
        # Pods first: a namespace that has some sleeps for half of their grace period before it looks again.
        self.api.kubectl(*own, "wait", "--for=delete", "pod", "--all", "--timeout=100s")
        self.api.kubectl("delete", "namespace", self.namespace, "--timeout=100s")

    async def client_of(self, pool: str, key: str = "") -> PoolClient:
        """Speaks to the pool's client Service."""
        return PoolClient(self._http, await self.url_of(pool), key, MODEL)

    async def url_of(self, pool: str) -> str:
        """Of the pool's client Service."""
        service = await self.client.get(_SERVICE, self.namespace, pool)
        return f"http://{service['spec']['clusterIP']}"

    async def routers(self, pool: str, *names_of_pods: str) -> dict[str, RouterReport]:
        """What the router in each of these pods (default: in all) says. Raises CliError if one does not answer."""
        pods = [pod for pod in await self.workers(pool) if not names_of_pods or pod["metadata"]["name"] in names_of_pods]
        admins = [AdminClient(self._http, f"http://{_address(pod)}:{names.ROUTER_ADMIN_PORT}") for pod in pods]
        reports = await asyncio.gather(*(admin.state() for admin in admins))
        return {pod["metadata"]["name"]: report.workers[0] for pod, report in zip(pods, reports, strict=True)}

    async def metric(self, pod: Any, name: str) -> float:
        """Sum of a metric of the router in one pod."""
        admin = PoolClient(self._http, f"http://{_address(pod)}:{names.ROUTER_ADMIN_PORT}", "", MODEL)
        found = samples((await admin.get(names.PATH_METRICS)).body.decode())
        return sum(sample.value for sample in found if sample.name == name)

    def router_of(self, pod: Any) -> PoolClient:
        """Speaks to the router in one pod."""
        return PoolClient(self._http, f"http://{_address(pod)}:{names.ROUTER_PORT}", "", MODEL)

    def engine_of(self, pod: Any, key: str) -> PoolClient:
        """Speaks to the engine in one pod, with the pool's own key."""
        return PoolClient(self._http, f"http://{_address(pod)}:{names.ENGINE_PORT}", key, MODEL)

    async def workers(self, pool: str) -> list[Any]:
        """Pods of the pool's replicas, by name."""
        return sorted(worker_pods(await self.pods(pool)), key=lambda pod: str(pod["metadata"]["name"]))

    async def ready(self, pool: str) -> int:
        """How many replicas kubelet calls ready."""
        return sum(is_ready(pod) for pod in await self.workers(pool))

    async def until_ready(self, pool: str, replicas: int, *, within_s: float = POOL_S) -> None:
        """Until exactly so many pods are there, all ready, of the newest spec, and the pool says so."""

        async def check() -> bool:
            obj = await self.get(kube.POOL, pool) or {}
            status = obj.get("status", {})
            told = [status.get(name) for name in ("replicas", "readyReplicas", "updatedReplicas")]
            fresh = status.get("observedGeneration") == obj.get("metadata", {}).get("generation")
            pods = await self.workers(pool)
            return fresh and told == [replicas] * 3 and len(pods) == replicas and all(map(is_ready, pods))

        await eventually(check, within_s=within_s, every_s=LOOK_S, what=f"{replicas} replicas of {pool} ready")

    async def restarts(self, pool: str) -> dict[tuple[str, str], int]:
        """By pod and container."""
        return {
            (pod["metadata"]["name"], one["name"]): one["restartCount"]
            for pod in await self.workers(pool)
            for one in _containers(pod)
        }

    async def until_restarted(self, pool: str, pod: str, container: str, times: int) -> None:
        """Until kubelet has started a container again so often."""

        async def check() -> bool:
            return (await self.restarts(pool)).get((pod, container)) == times

        await eventually(check, within_s=POOL_S, every_s=LOOK_S, what=f"{container} of {pod} restarted {times} times")

    async def router_images(self, pool: str) -> set[str]:
        """That its pods ask for: of an image with two names, status may show the other one."""
        asked = [one for pod in await self.workers(pool) for one in pod["spec"]["initContainers"]]
        return {one["image"] for one in asked if one["name"] == "router"}

    @asynccontextmanager
    async def without_operator(self) -> AsyncIterator[None]:
        """No operator runs while the block lasts."""
        await self._operators(0)
        try:
            yield
        finally:
            await self._operators(2)

    async def _operators(self, replicas: int) -> None:
        operators = ("-n", chart.NAMESPACE)
        await self.api.kubectl_async(*operators, "scale", OPERATOR, f"--replicas={replicas}")
        await self.api.kubectl_async(*operators, "rollout", "status", OPERATOR, "--timeout=100s")
        if not replicas:
            gone = ("wait", "--for=delete", "pod", "-l", "app.kubernetes.io/component=operator", "--timeout=100s")
            await self.api.kubectl_async(*operators, *gone)

    @asynccontextmanager
    async def other_router_image(self) -> AsyncIterator[str]:
        """The operators want another image in routers while the block lasts: the same one, by another name."""
        other = images.CONTROL + "-other"
        self.cluster.ctr("images", "tag", "--force", images.CONTROL, other)
        await asyncio.to_thread(install, self.cluster, other)
        try:
            yield other
        finally:
            await asyncio.to_thread(install, self.cluster)

    @asynccontextmanager
    async def ready_counts(self, pool: str) -> AsyncIterator[list[int]]:
        """Numbers of ready replicas, looked at again and again while the block lasts."""
        seen: list[int] = [await self.ready(pool)]

        async def look() -> None:
            while True:
                seen.append(await self.ready(pool))
                await asyncio.sleep(0.2)

        task = asyncio.create_task(look())
        try:
            yield seen
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _address(pod: Any) -> str:
    """Blank before it has one."""
    return str(pod.get("status", {}).get("podIP", ""))


def _containers(pod: Any) -> list[Any]:
    """Their status."""
    status = pod.get("status", {})
    return [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]


def is_ready(pod: Any) -> bool:
    """By its condition; one that is being deleted isn't."""
    conditions = pod.get("status", {}).get("conditions", ())
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]


@asynccontextmanager
async def pool_place(cluster: Node) -> AsyncIterator[PoolPlace]:
    """Its namespace stays, until `remove`."""
    client = await admin_client(cluster.api)
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            yield PoolPlace(cluster, client, http)
    finally:
        await client.close()
