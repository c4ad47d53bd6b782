"""Who reaches what of a pool: NetworkPolicies and rights as this cluster enforces them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final

import pytest

from prefixpool import names
from prefixpool_operator import kube
from prefixpool_operator.identity import L_SCRAPE
from prefixpool_operator.observed import Raw
from prefixpool_testing import chart
from prefixpool_testing.cluster import images
from prefixpool_testing.cluster.errors import ClusterError
from prefixpool_testing.cluster.kubectl import RESTRICTED
from prefixpool_testing.cluster.product import OPERATOR, POOL_S, PoolPlace
from prefixpool_testing.eventually import eventually
from prefixpool_testing.operated import LOOK_S, POOLS

CLIENT: Final = "stranger"
FOR_ALL: Final = {"service", "router"}
FOR_WATCHERS: Final = FOR_ALL | {"agent", "admin"}
FOR_THE_POOL: Final = FOR_WATCHERS | {"engine"}
_PORTS: Final = {
    "router": names.ROUTER_PORT,
    "admin": names.ROUTER_ADMIN_PORT,
    "engine": names.ENGINE_PORT,
    "agent": names.AGENT_PORT,
}
_CONNECT: Final = """
import socket, sys
for target in sys.argv[1:]:
    name, host, port = target.split(",")
    try:
        socket.create_connection((host, int(port)), 5).close()
    except OSError:
        continue
    print(name)
"""


@pytest.fixture
def elsewhere(place: PoolPlace) -> Iterator[str]:
    """A namespace of somebody else's, with a pod `CLIENT` that runs."""
    name = f"{place.namespace}-elsewhere"
    place.api.make_namespaces(name, labels=RESTRICTED)
    running_client(place, name)
    yield name
    place.api.kubectl("delete", "namespace", name, "--wait=false")


def running_client(place: PoolPlace, namespace: str) -> None:
    """Until it runs."""
    place.api.apply(client_pod(namespace))
    place.api.kubectl("-n", namespace, "wait", "--for=condition=Ready", f"pod/{CLIENT}", "--timeout=100s")


def client_pod(namespace: str) -> Raw:
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {"name": CLIENT, "image": images.CONTROL, "command": ["sleep", "infinity"], "securityContext": security}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": CLIENT, "namespace": namespace},
        "spec": {
            "containers": [container],
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "terminationGracePeriodSeconds": 1,
        },
    }


class Target:
    """One pod of a pool, and the pool's Service."""

    def __init__(self, place: PoolPlace, pod: Raw, service: str) -> None:
        self._place = place
        address = pod["status"]["podIP"]
        self._targets = [f"service,{service.removeprefix('http://')},80"]
        self._targets += [f"{name},{address},{port}" for name, port in _PORTS.items()]

    async def seen_from(self, namespace: str, pod: str, container: str) -> set[str]:
        """What a container connects to."""
        command = ("exec", pod, "-c", container, "--", "python3", "-c", _CONNECT, *self._targets)
        return set((await self._place.api.kubectl_async("-n", namespace, *command)).split())

    async def until_seen(self, expected: set[str], namespace: str, pod: str, container: str) -> None:
        """Until that is `expected`: policies are enforced a moment after they, or pods, are made."""

        async def check() -> bool:
            return await self.seen_from(namespace, pod, container) == expected

        await eventually(check, within_s=POOL_S, every_s=LOOK_S, what=f"{namespace}/{pod} reaches {sorted(expected)}")


@pytest.fixture
def neighbour(place: PoolPlace) -> Iterator[None]:
    """A pod `CLIENT` in the operator's namespace that is none of its own."""
    running_client(place, chart.NAMESPACE)
    yield
    place.api.kubectl("-n", chart.NAMESPACE, "delete", "pod", CLIENT, "--wait=false")


@pytest.mark.usefixtures("neighbour")
async def test_a_pool_is_reached_as_its_network_policy_says(place: PoolPlace, elsewhere: str) -> None:
    await place.apply("guarded", replicas=2)
    await place.apply("another", replicas=1)
    await place.until_ready("guarded", 2)
    await place.until_ready("another", 1)
    _, pod = await place.workers("guarded")
    target = Target(place, pod, await place.url_of("guarded"))
    await target.until_seen(FOR_ALL, elsewhere, CLIENT, CLIENT)
    await target.until_seen(FOR_ALL, place.namespace, "another-0", "router")
    await target.until_seen(FOR_THE_POOL, place.namespace, "guarded-0", "router")
    await target.until_seen(FOR_WATCHERS, chart.NAMESPACE, OPERATOR, "operator")
    await target.until_seen(FOR_ALL, chart.NAMESPACE, CLIENT, CLIENT)
    assert await target.seen_from(elsewhere, CLIENT, CLIENT) == FOR_ALL, "it stays so"
    await place.kubectl("label", "namespace", elsewhere, f"{L_SCRAPE}=true")
    await target.until_seen(FOR_WATCHERS, elsewhere, CLIENT, CLIENT)


async def test_rights_in_one_namespace_reach_no_pool_of_another(place: PoolPlace, elsewhere: str) -> None:
    own = ("-n", elsewhere)
    await place.api.kubectl_async(*own, "create", "serviceaccount", "team")
    granted = ("--clusterrole=admin", f"--serviceaccount={elsewhere}:team")
    await place.api.kubectl_async(*own, "create", "rolebinding", "team", *granted)
    config = str(await asyncio.to_thread(place.api.kubeconfig_of, "team", elsewhere))
    await place.apply("theirs", replicas=1)
    await place.until_ready("theirs", 1)
    assert await place.get(kube.SECRET, "theirs-keys") is not None
    assert await place.api.kubectl_async("--kubeconfig", config, *own, "get", POOLS) == "", "it may look, and finds none"
    for forbidden in (
        ("get", f"{POOLS}/theirs"),
        ("get", "secret/theirs-keys"),
        ("exec", "theirs-0", "-c", "worker", "--", "true"),
        ("delete", f"{POOLS}/theirs"),
    ):
        with pytest.raises(ClusterError, match="Forbidden"):
            await place.api.kubectl_async("--kubeconfig", config, "-n", place.namespace, *forbidden)
