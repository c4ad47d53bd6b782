"""What wakes a pool at once: kopf watches pools and everything of theirs. It decides nothing and writes nothing.

kopf runs in a thread and event loop of its own: it cancels tasks that are not its own when it ends. Only `on.event`
handlers are registered, because all others leave finalizers or annotations on objects. When watching ends by itself (a
server that is down for long, a watch that is refused, a CRD that was deleted), it is started again; until then the resync
does its work. kopf asks only once which kinds there are, and never watches one that is missing then: so it begins once they
are there, and again if the server's discovery was behind. A namespace that it may not watch ends it, so it is given those
that may be read now.

kopf is ended here, not by itself. It would close its connections under the watches that are left, wait five seconds for
them, cancel each once, and then wait without end; a watch that is asking the server just then takes that for a pause and
goes on.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Final

import kopf
from kopf._cogs.structs.references import Insights
from kubernetes.aio.client import Configuration

from prefixpool_operator import kube
from prefixpool_operator.changes import EVERYWHERE, MANAGED, owner
from prefixpool_operator.controller import PoolKey
from prefixpool_operator.kube import KubeError, Resource, UnavailableError
from prefixpool_operator.metrics import OperatorMetrics

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 1.0  # before watching starts again; doubles up to the next
_LONGEST_PAUSE_S: Final = 30.0
_STEADY_S: Final = 60.0  # what went well for so long starts again with the first pause
_LOOK_S: Final = 60.0  # between two looks at which namespaces may be read
_STOP_S: Final = 5.0
_CANCEL_S: Final = 0.5  # before what was cancelled and is still there is cancelled again
_PAUSES: Final = "pause-waiter"  # tasks of this name end with their watches, which would take it for a pause otherwise


class Triggers:
    """`wake` is called in the loop that runs `run`. `load` says where the API server is and how to log in.

    `known` returns the namespaces that may be read, or EVERYWHERE; KubeError while the cluster does not know InferencePools.
    """

    def __init__(
        self,
        wake: Callable[[PoolKey], None],
        load: Callable[[], Awaitable[Configuration]],
        known: Callable[[], Awaitable[tuple[str, ...]]],
        *,
        kinds: tuple[Resource, ...],
        timeout_s: float,
        metrics: OperatorMetrics,
    ) -> None:
        self._wake = wake
        self._load = load
        self._known = known
        self._kinds = kinds
        self._timeout_s = timeout_s
        self._metrics = metrics

    async def run(self) -> None:
        """Until cancelled."""
        pause_s = _FIRST_PAUSE_S
        while True:
            began_s = asyncio.get_running_loop().time()
            why = await self._watch()
            if asyncio.get_running_loop().time() - began_s > _STEADY_S:
                pause_s = _FIRST_PAUSE_S
            _log.warning("watching ended; it starts again", extra={"error": str(why or ""), "again_s": pause_s})
            self._metrics.watch_restarts.inc()
            await asyncio.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, pause_s * 2)

    async def _watch(self) -> BaseException | None:
        """One life of kopf; what ended it, or kept it from beginning."""
        try:
            namespaces = await self._known()
        except KubeError as error:
            return error
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[BaseException | None] = loop.create_future()
        stop = threading.Event()

        def tell(why: BaseException | None) -> None:
            if not ended.done():
                ended.set_result(why)

        async def live() -> None:
            why: BaseException | None = None
            try:
                await self._operator(loop, stop, namespaces)
            except BaseException as error:  # noqa: BLE001 -- the end of the thread; whoever waits decides
                why = error
            with suppress(RuntimeError):  # nobody waits any more
                loop.call_soon_threadsafe(tell, why)

        threading.Thread(target=lambda: asyncio.run(live()), name="kopf", daemon=True).start()
        try:
            return await self._until(ended, namespaces)
        finally:
            stop.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(_STOP_S):
                    await ended

    async def _until(self, ended: asyncio.Future[BaseException | None], watched: tuple[str, ...]) -> BaseException | None:
        """What ended it; None also when there are other namespaces to watch."""
        while True:
            if (await asyncio.wait({ended}, timeout=None if watched == EVERYWHERE else _LOOK_S))[0]:
                return ended.result()
            with suppress(KubeError):  # the resync tells of it
                if await self._known() != watched:
                    return None

    async def _operator(self, loop: asyncio.AbstractEventLoop, stop: threading.Event, namespaces: tuple[str, ...]) -> None:
        registry = kopf.OperatorRegistry()
        kopf.on.login(id="login", registry=registry)(self._login)
        for resource in (kube.POOL, *self._kinds):
            names = (resource.group, resource.api_version.rpartition("/")[2], resource.plural)
            kopf.on.event(*names, id=resource.plural, registry=registry)(self._handler(resource, loop))
        insights = Insights()
        try:
            tasks = await kopf.spawn_tasks(
                registry=registry,
                insights=insights,
                settings=self._settings(),
                standalone=True,
                # Unused, but without one kopf asks for the user's name, and a container's user has none.
                identity="prefixpool-operator",  # type: ignore[arg-type]  # a str by a name not exported
                clusterwide=namespaces == EVERYWHERE,
                namespaces=() if namespaces == EVERYWHERE else namespaces,
                stop_flag=stop,
            )
            discovery = asyncio.create_task(self._discovered(insights))
            done, _ = await asyncio.wait({*tasks, discovery}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.set()  # a thread of this loop waits for it, and the loop does not end before that thread
            await _end_others()
        for task in done:
            task.result()

    async def _discovered(self, insights: Insights) -> None:
        """Never returns; UnavailableError: a kind is missing, which kopf would not watch as long as it lives."""
        await insights.ready_resources.wait()
        found = {(one.group, one.plural) for one in insights.watched_resources}
        if missing := [one.plural for one in (kube.POOL, *self._kinds) if (one.group, one.plural) not in found]:
            raise UnavailableError(f"the API server does not tell of {', '.join(missing)} yet")
        await asyncio.Event().wait()

    def _handler(self, resource: Resource, loop: asyncio.AbstractEventLoop) -> Callable[..., Awaitable[None]]:
        def key_of(body: Mapping[str, Any]) -> PoolKey:
            if resource == kube.POOL:
                return PoolKey(body["metadata"]["namespace"], body["metadata"]["name"])
            return owner(dict(body))

        async def seen(body: kopf.Body, **_: Any) -> None:
            key = key_of(body)
            if key.name:
                loop.call_soon_threadsafe(self._wake, key)

        return seen

    def _settings(self) -> kopf.OperatorSettings:
        settings = kopf.OperatorSettings()
        settings.process.ultimate_exiting_timeout = None  # else it kills the process that long after it began to end
        settings.posting.enabled = False
        settings.scanning.disabled = True  # kinds are fixed, and no right to list CRDs and namespaces is needed
        settings.networking.request_timeout = self._timeout_s
        settings.networking.error_backoffs = (1, 2, 4, 8)
        settings.watching.server_timeout = 300
        settings.watching.client_timeout = 310
        settings.watching.connect_timeout = self._timeout_s
        settings.watching.chunk_size = 500
        for resource in self._kinds:
            names = (resource.group, resource.api_version.rpartition("/")[2], resource.plural)
            settings.watching.label_selectors[names] = MANAGED
        return settings

    async def _login(self, **_: Any) -> kopf.ConnectionInfo:
        """The same way in as the rest of the operator's."""
        found = await self._load()
        token = await found.get_api_key_with_prefix("BearerToken")
        scheme, _blank, secret = (token or "").partition(" ")
        return kopf.ConnectionInfo(
            server=found.host,
            ca_path=found.ssl_ca_cert,
            insecure=not found.verify_ssl,
            scheme=scheme or None,
            token=secret or None,
            certificate_path=found.cert_file,
            private_key_path=found.key_file,
            proxy_url=found.proxy,
        )


async def _end_others() -> None:
    """All other tasks of this loop. Those that do not listen are left to themselves: watching starts again without them."""
    loop, this = asyncio.get_running_loop(), asyncio.current_task()
    until_s = loop.time() + _STOP_S
    while left := {task for task in asyncio.all_tasks() if task is not this}:
        if loop.time() > until_s:
            _log.warning("some of what watched does not end", extra={"tasks": sorted(task.get_name() for task in left)})
            return
        for task in {task for task in left if not task.get_name().startswith(_PAUSES)} or left:
            task.cancel()
        await asyncio.wait(left, timeout=_CANCEL_S)
