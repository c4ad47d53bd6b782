"""A router in the test's own process: its parts can be looked at directly, and it need not be ready."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prefixpool_router.explain import Explanation
from prefixpool_router.serve import Router
from prefixpool_router.settings import RouterSettings
from prefixpool_testing.eventually import eventually


@asynccontextmanager
async def router_here(settings: RouterSettings) -> AsyncIterator[Router]:
    """Listening, on the ports that the settings say (0: any)."""
    router = Router(settings)
    task = asyncio.create_task(router.serve())

    async def listening() -> bool:
        if task.done():
            task.result()
        return router.edge.port != 0

    try:
        await eventually(listening, what="the router listens")
        yield router
    finally:
        router.draining.begin(hurry=True)
        await asyncio.gather(task, return_exceptions=True)


def explanation(router: Router, request_id: str) -> Explanation:
    """The last decision about a request."""
    return router.decisions.latest(1, request_id)[0].explanation(0)
