"""An operator for one namespace: Roles there, no right anywhere else, none to see nodes."""

from __future__ import annotations

import asyncio

from prefixpool_operator import kube
from prefixpool_testing.cluster.api_server import ApiServer
from prefixpool_testing.operated import Place
from prefixpool_testing.operator_program import OperatorProgram, admin_client, install


async def test_one_namespace_is_looked_after_and_no_other(api: ApiServer) -> None:
    await asyncio.to_thread(install, api)  # the CRD must be there before a namespace can be given
    client = await admin_client(api)
    ours, theirs = Place(api, client), Place(api, client)
    with ours, theirs:
        await in_one_namespace(api, ours, theirs)
    await client.close()


async def in_one_namespace(api: ApiServer, ours: Place, theirs: Place) -> None:
    account = "namespaced"
    await asyncio.to_thread(install, api, account=account, namespaces=[ours.namespace])
    flags = ("--namespaces", ours.namespace, "--lease-name", account)
    operator = OperatorProgram(api, account, *flags, account=account)
    operator.start()
    try:
        await operator.until_leading()
        await theirs.apply("p")
        await ours.apply("p")
        await ours.serve("p", replicas=2)
        other = await theirs.get(kube.POOL, "p")
        assert other is not None
        assert "conditions" not in other.get("status", {})
    finally:
        operator.stop()
