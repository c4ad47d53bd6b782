"""Members from a Kubernetes Service's EndpointSlices: list, watch, list again after whatever went wrong.

Nothing that happened while the API could not be reached is missed: a new list is a whole new picture. Until then the last
one stays in force.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import Final

from prefixpool.errors import SettingsError
from prefixpool.kubernetes_names import check_label
from prefixpool.listening import in_url
from prefixpool_router.endpoint_slices import EndpointSlice, members_of, portless
from prefixpool_router.kubernetes_api import ApiError, ApiServer, Deadlines, SliceApi, StaleError
from prefixpool_router.membership import Member
from prefixpool_router.settings import RouterSettings

_log = logging.getLogger(__name__)
_DEBOUNCE_S: Final = 0.05  # a rollout changes several slices within milliseconds
_FIRST_PAUSE_S: Final = 0.2  # before the next try; doubles; times 0.5 to 1, so that many routers don't come at once
_LONGEST_PAUSE_S: Final = 4.0
_STEADY_S: Final = 10.0  # what went well for so long starts again with the first pause
_SHORTEST_WATCH_S: Final = 1.0  # a server that ends watches at once, without a word, is not well


class KubernetesMembers:
    """A membership.MembershipSource. `draw`: 0 to 1."""

    def __init__(
        self,
        server: ApiServer,
        *,
        deadlines: Deadlines = Deadlines(),  # noqa: B008 (immutable)
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._server = server
        self._deadlines = deadlines
        self._draw = draw
        self._slices: dict[str, EndpointSlice] = {}
        self._changed = asyncio.Event()
        self.problem = f"{self._where}: not listed yet"

    async def updates(self) -> AsyncGenerator[tuple[Member, ...], None]:
        """A set each time something changed that matters."""
        keeping = asyncio.create_task(self._keep(), name="endpoint slices")
        told: tuple[Member, ...] | None = None
        try:
            while True:
                await self._until_changed(keeping)
                members = members_of(self._slices.values())
                if members != told:
                    told = members
                    yield members
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    async def _until_changed(self, keeping: asyncio.Task[None]) -> None:
        waiting = asyncio.create_task(self._changed.wait(), name="slices changed")
        try:
            await asyncio.wait({waiting, keeping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if keeping.done():
            keeping.result()  # a defect
        await asyncio.sleep(_DEBOUNCE_S)
        self._changed.clear()

    async def _keep(self) -> None:
        """Never returns."""
        loop, pause_s = asyncio.get_running_loop(), _FIRST_PAUSE_S
        while True:
            began_s = loop.time()
            try:
                async with SliceApi(self._server, self._deadlines._replace(watch=self._watch_s())) as api:
                    await self._follow(api)
            except StaleError as stale:
                _log.info("listing replicas anew", extra={"cause": str(stale)})
            except ApiError as error:
                self._failed(str(error))
            if loop.time() - began_s > _STEADY_S:
                pause_s = _FIRST_PAUSE_S
            await asyncio.sleep(pause_s * (0.5 + self._draw() / 2))
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    async def _follow(self, api: SliceApi) -> None:
        """List, then one watch after another. Raises ApiError."""
        self._slices, version = await api.list()
        self._learned()
        loop = asyncio.get_running_loop()
        while True:
            began_s, heard = loop.time(), False
            async with contextlib.aclosing(api.watch(version)) as changes:
                async for change in changes:
                    version, heard = change.version, True
                    if change.slice is not None:
                        self._take(change.slice, deleted=change.deleted)
            if not heard and loop.time() - began_s < _SHORTEST_WATCH_S:
                raise ApiError(f"watch: {self._server.url} ended it at once")

    def _take(self, found: EndpointSlice, *, deleted: bool) -> None:
        if deleted:
            self._slices.pop(found.metadata.name, None)
        else:
            self._slices[found.metadata.name] = found
        self._learned()

    def _learned(self) -> None:
        name = portless(self._slices.values())
        if name:
            self._failed(f"EndpointSlice {name} has no port `engine`: not the headless Service of a pool?")
        else:
            self.problem = ""
        self._changed.set()

    def _failed(self, problem: str) -> None:
        problem = f"{self._where}: {problem}"
        if problem != self.problem:
            _log.error("replicas cannot be looked up, keeping the last set", extra={"problem": problem})
        self.problem = problem

    @property
    def _where(self) -> str:
        return f"EndpointSlices of {self._server.namespace}/{self._server.service}"

    def _watch_s(self) -> float:
        return self._deadlines.watch * (0.75 + self._draw() / 4)


def api_server(settings: RouterSettings, env: Mapping[str, str] = os.environ) -> ApiServer:
    """Where to look, from settings, or from what Kubernetes gives to each pod. Raises SettingsError."""
    token_file = Path(settings.kubernetes_token_file)
    namespace = settings.kubernetes_namespace or _own_namespace(token_file.with_name("namespace"))
    check_label("--kubernetes-namespace", namespace)
    check_label("--kubernetes-service", settings.kubernetes_service)
    return ApiServer(
        _url(settings.kubernetes_url, env), namespace, settings.kubernetes_service, token_file, settings.kubernetes_ca_file
    )


def _own_namespace(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise SettingsError(f"--kubernetes-namespace is needed: {path}: {error.strerror}") from error


def _url(given: str, env: Mapping[str, str]) -> str:
    if given:
        if not given.startswith(("http://", "https://")):
            raise SettingsError(f"--kubernetes-url={given}: expected https://HOST:PORT")
        return given
    host, port = env.get("KUBERNETES_SERVICE_HOST", ""), env.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise SettingsError("--kubernetes-url is needed: KUBERNETES_SERVICE_HOST is not set, so this is not a pod")
    return f"https://{in_url(host)}:{port}"
