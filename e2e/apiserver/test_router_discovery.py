"""The router's discovery on a real API server: pods are only objects here, but the slices are its own controller's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from prefixpool_router.kubernetes_api import ApiServer as Server
from prefixpool_router.kubernetes_api import Deadlines
from prefixpool_router.kubernetes_members import KubernetesMembers
from prefixpool_router.membership import Member, MemberState
from prefixpool_testing.cluster.api_server import ApiServer
from prefixpool_testing.following import Follower, following

SERVICE: Final = "pool-replicas"
ACCOUNT: Final = "router"
RECONNECTED_S: Final = 5.0
NODE: Final = "nowhere"  # a pod on a node is deleted only once its kubelet says so: until then it terminates
LABELS: Final = {"prefixpool.dev/pool": "pool"}

HEADLESS: Final = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": SERVICE},
    "spec": {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": LABELS,
        "ports": [{"name": "engine", "port": 8100}, {"name": "agent", "port": 8101}, {"name": "router", "port": 8000}],
    },
}
ROLE: Final = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "Role",
    "metadata": {"name": ACCOUNT},
    "rules": [{"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}],
}


def pod(ordinal: int) -> dict[str, Any]:
    """As the StatefulSet would make it, scheduled to a node that does not exist."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"pool-{ordinal}", "labels": LABELS},
        "spec": {
            "hostname": f"pool-{ordinal}",
            "subdomain": SERVICE,
            "nodeName": NODE,
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 600,
            "tolerations": [{"operator": "Exists"}],
            "containers": [{"name": "worker", "image": "none"}],
        },
    }


class Cluster:
    """One namespace with a pool's Service."""

    def __init__(self, api: ApiServer, namespace: str) -> None:
        self.api = api
        self.namespace = namespace

    async def apply(self, *objects: dict[str, Any]) -> None:
        placed = [{**each, "metadata": {**each["metadata"], "namespace": self.namespace}} for each in objects]
        await asyncio.to_thread(self.api.apply, *placed)

    async def kubectl(self, *words: str) -> str:
        return await self.api.kubectl_async(*words, "-n", self.namespace)

    async def run_pod(self, ordinal: int, address: str, *, ready: bool) -> None:
        """Say what a kubelet would."""
        await self.apply(pod(ordinal))
        condition = f'{{"type": "Ready", "status": "{ready}"}}'
        status = (
            f'{{"phase": "Running", "podIP": "{address}", "podIPs": [{{"ip": "{address}"}}], "conditions": [{condition}]}}'
        )
        await self.kubectl(
            "patch", "pod", f"pool-{ordinal}", "--subresource=status", "--type=merge", "-p", f'{{"status": {status}}}'
        )

    async def allow(self) -> None:
        await self.apply(ROLE)
        await self.kubectl(
            "create", "rolebinding", ACCOUNT, f"--role={ACCOUNT}", f"--serviceaccount={self.namespace}:{ACCOUNT}"
        )

    @asynccontextmanager
    async def router(self, folder: Path, deadlines: Deadlines = Deadlines()) -> AsyncIterator[Follower]:  # noqa: B008
        """With a token of the router's ServiceAccount."""
        token = folder / "token"
        token.write_text(await self.kubectl("create", "token", ACCOUNT, "--duration=1h"))
        authority = str(self.api.folder / "pki/ca.crt")
        server = Server(self.api.url, self.namespace, SERVICE, token, authority)
        async with following(KubernetesMembers(server, deadlines=deadlines)) as follower:
            yield follower


@pytest.fixture
async def cluster(api: ApiServer, namespace: str) -> Cluster:
    made = Cluster(api, namespace)
    await made.kubectl("create", "serviceaccount", ACCOUNT)
    await made.kubectl("wait", "--for=create", "serviceaccount/default", "--timeout=60s")
    await made.apply(HEADLESS)
    return made


async def test_pods_of_the_headless_service_come_end_and_go(cluster: Cluster, tmp_path: Path) -> None:
    await cluster.allow()
    async with cluster.router(tmp_path) as router:
        await router.knows()
        await cluster.run_pod(0, "10.9.0.1", ready=True)
        await cluster.run_pod(1, "10.9.0.2", ready=False)
        await router.knows("pool-0", "pool-1")
        assert router.members["pool-0"] == Member(
            name="pool-0", engine="http://10.9.0.1:8100", agent="http://10.9.0.1:8101", state=MemberState.READY
        )
        assert router.members["pool-1"].state is MemberState.READY, "the Service publishes it; its agent says the rest"
        await cluster.kubectl("delete", "pod", "pool-0", "--wait=false")
        await router.until(
            lambda: router.members["pool-0"].state is MemberState.TERMINATING, what="pool-0 ends", within_s=RECONNECTED_S
        )
        await cluster.kubectl("delete", "pod", "pool-0", "--force", "--grace-period=0")
        await router.knows("pool-1", within_s=RECONNECTED_S)
        await cluster.run_pod(0, "10.9.0.3", ready=True)  # its successor
        await router.until(
            lambda: "pool-0" in router.members and router.members["pool-0"].engine == "http://10.9.0.3:8100",
            what="the new pool-0",
        )
        assert router.source.problem == ""


async def test_without_a_role_the_problem_names_it_and_the_router_finds_out_when_it_is_there(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with cluster.router(tmp_path) as router:
        await router.problem("apiGroups [discovery.k8s.io], resources [endpointslices], verbs [get, list, watch]")
        await cluster.allow()
        await router.knows()
        await router.problem("")


async def test_an_api_server_that_dies_leaves_the_last_set_and_what_then_changed_is_known_once_it_is_back(
    cluster: Cluster, tmp_path: Path
) -> None:
    await cluster.allow()
    await cluster.run_pod(0, "10.9.0.1", ready=True)
    async with cluster.router(tmp_path) as router:
        await router.knows("pool-0")
        cluster.api.kill()
        await router.problem("no connection to")
        assert list(router.members) == ["pool-0"]
        cluster.api.start()  # in this thread: with the one that starts it, it ends
        await router.problem("")
        await cluster.run_pod(1, "10.9.0.2", ready=True)
        await router.knows("pool-0", "pool-1")


async def test_watches_that_the_server_ends_go_on_where_they_were(cluster: Cluster, tmp_path: Path) -> None:
    await cluster.allow()
    since = cluster.api.audit_log.stat().st_size
    async with cluster.router(tmp_path, Deadlines(watch=2.0)) as router:
        await router.knows()

        def watches() -> int:
            return sum(each.verb == "watch" and ACCOUNT in each.user.username for each in cluster.api.asked(since))

        await router.until(lambda: watches() >= 3, what="three watches")
        await cluster.run_pod(0, "10.9.0.1", ready=True)
        await router.knows("pool-0")
        lists = [each for each in cluster.api.asked(since) if each.verb == "list" and ACCOUNT in each.user.username]
        assert len(lists) == 1
        assert router.source.problem == ""
