"""An API server with operators, as tests use it: pools in namespaces of their own, and waiting for what becomes of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Final, Self
from uuid import uuid4

from prefixpool_operator import kube
from prefixpool_operator.identity import L_POOL
from prefixpool_operator.kube import NotFoundError, Resource
from prefixpool_operator.kube_client import KubeClient
from prefixpool_operator.observed import Raw
from prefixpool_testing.cluster.api_server import ApiServer
from prefixpool_testing.eventually import eventually
from prefixpool_testing.operator_program import OperatorProgram, PaperKubelet, admin_client, install

POOLS: Final = "inferencepools.prefixpool.dev"
SPEC: Final[Mapping[str, Any]] = {
    "model": {"source": "HuggingFaceTB/SmolLM2-135M-Instruct"},
    "engine": {"kind": "sim"},
    "accelerator": {"resource": "cpu", "memory": "4Gi"},
    "replicas": 2,
}
ALL_KINDS: Final = (*kube.CHILDREN, *kube.RBAC_CHILDREN, kube.SECRET, kube.POD)
LOOK_S: Final = 0.1  # between two looks at an API server, which has the same cores


class Place:
    """A namespace of one test; its pools end with it. `client` has all rights, as a person with kubectl has here."""

    def __init__(self, api: ApiServer, client: KubeClient) -> None:
        self.api = api
        self.client = client
        self.namespace = f"test-{uuid4().hex[:8]}"
        self.kubelet = PaperKubelet(client)
        api.make_namespaces(self.namespace)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.api.kubectl("-n", self.namespace, "delete", POOLS, "--all", "--wait=false", "--ignore-not-found")

    async def apply(self, name: str, **spec: Any) -> None:
        """As `kubectl apply --server-side`; fields of the spec beside or instead of `SPEC`'s. None: without the field."""
        whole = {key: value for key, value in {**SPEC, **spec}.items() if value is not None}
        meta = {"name": name, "namespace": self.namespace}
        pool = {"apiVersion": kube.POOL.api_version, "kind": kube.POOL.kind, "metadata": meta, "spec": whole}
        await asyncio.to_thread(self.api.apply, pool)

    async def kubectl(self, *arguments: str) -> str:
        return await self.api.kubectl_async("-n", self.namespace, *arguments)

    async def get(self, resource: Resource, name: str) -> Raw | None:
        """None: there is none."""
        try:
            return await self.client.get(resource, self.namespace, name)
        except NotFoundError:
            return None

    async def children(self, pool: str) -> dict[tuple[str, str], Raw]:
        """Everything that bears the pool's label, pods included."""
        lists = await asyncio.gather(
            *(self.client.list_all(kind, self.namespace, labels=f"{L_POOL}={pool}") for kind in ALL_KINDS)
        )
        return {(obj["kind"], obj["metadata"]["name"]): obj for found in lists for obj in found}

    async def pods(self, pool: str) -> list[Raw]:
        return await self.client.list_all(kube.POD, self.namespace, labels=f"{L_POOL}={pool}")

    async def condition(self, pool: str, kind: str) -> tuple[str, str, str]:
        """Status, reason, message; of the spec as it is now. Blank before that."""
        obj = await self.get(kube.POOL, pool) or {"metadata": {"generation": 0}}
        for one in obj.get("status", {}).get("conditions", ()):
            if one["type"] == kind and one["observedGeneration"] == obj["metadata"]["generation"]:
                return one["status"], one["reason"], one["message"]
        return "", "", ""

    async def until(self, pool: str, kind: str, status: str, reason: str = "", *, within_s: float = 30) -> str:
        """Until the condition is so; its message."""
        seen: tuple[str, str, str] = ("", "", "")

        async def check() -> bool:
            nonlocal seen
            seen = await self.condition(pool, kind)
            return seen[0] == status and reason in ("", seen[1])

        try:
            await eventually(check, within_s=within_s, every_s=LOOK_S, what=f"{pool} is {kind}={status} {reason}")
        except AssertionError as error:
            raise AssertionError(f"{error}; the condition is {seen}") from error
        return seen[2]

    async def until_replicas(self, pool: str, replicas: int, *, within_s: float) -> None:
        """Until so many pods are counted in the pool's status."""

        async def check() -> bool:
            return bool((await self.get(kube.POOL, pool) or {}).get("status", {}).get("replicas") == replicas)

        await eventually(check, within_s=within_s, every_s=LOOK_S, what=f"{pool} has {replicas} pods")

    async def serve(self, pool: str, replicas: int) -> None:
        """Until so many pods are there, which a kubelet of paper then declares ready, and the pool Available."""

        async def check() -> bool:
            return await self.kubelet.run_pods(self.namespace, pool) == replicas

        async def counted() -> bool:
            status = (await self.get(kube.POOL, pool) or {}).get("status", {})
            return bool(status.get("readyReplicas") == status.get("replicas") == replicas)

        await eventually(check, within_s=60, every_s=LOOK_S, what=f"{replicas} pods of {pool}")
        await eventually(counted, every_s=LOOK_S, what=f"{pool} says that all are ready")
        await self.until(pool, "Available", "True")


@asynccontextmanager
async def operated(api: ApiServer, *flags: str) -> AsyncIterator[tuple[KubeClient, OperatorProgram]]:
    """One operator that leads, with the shipped rights; a client with all rights."""
    await asyncio.to_thread(install, api)
    client = await admin_client(api)
    operator = OperatorProgram(api, "operator", *flags)
    operator.start()
    try:
        await operator.until_leading()
        yield client, operator
    except BaseException as error:
        error.add_note(f"the operator's last words:\n{operator.tail}")
        raise
    finally:
        operator.stop()
        await client.close()
