"""`KubeApi` over HTTP. Addresses, certificates and tokens are the kubernetes library's business, objects are ours."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final
from urllib.parse import urlencode

import aiohttp
import msgspec
from kubernetes.aio import config as kube_config
from kubernetes.aio.client import ApiClient, Configuration

from prefixpool.errors import SettingsError
from prefixpool_operator.kube import Content, GoneError, Resource, UnavailableError, error_of
from prefixpool_operator.observed import Raw

_log = logging.getLogger(__name__)

AT_ONCE: Final = 16
PAGE: Final = 500  # objects of one answer; a list of pods is megabytes
_QUOTED: Final = 300  # bytes
_METADATA: Final = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_METADATA_LIST: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
_UNREACHABLE: Final = (aiohttp.ClientError, TimeoutError, OSError)
_APPLY: Final = f"{Content.APPLY}; charset=utf-8"  # so named, the kubernetes library sends bytes as they are
_ESCAPED: Final = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


async def load_configuration() -> Configuration:
    """In a pod its ServiceAccount, whose token is read again in time; else the kubeconfig. SettingsError: neither."""
    configuration = Configuration()
    try:
        if "KUBERNETES_SERVICE_HOST" in os.environ:
            kube_config.load_incluster_config(configuration)  # type: ignore[no-untyped-call]
        else:
            await kube_config.load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except Exception as error:  # a file that is no kubeconfig breaks the library in any way
        why = (
            str(error) if isinstance(error, (kube_config.ConfigException, OSError)) else f"the kubeconfig is broken: {error}"
        )
        raise SettingsError(
            f"no Kubernetes API server to talk to: {why}. Run in a pod with a ServiceAccount, or set KUBECONFIG to a file "
            "with which `kubectl get --raw /version` answers"
        ) from error
    return configuration


class KubeClient:
    """Built inside a running event loop; close it there. `timeout_s` is for one request, answer included.

    At most `at_once` requests are on their way: a server that is slow gets slower by more. Waiting for a turn is the
    caller's time. `load` is asked again when the server no longer takes the credentials: tokens of kubeconfig plug-ins end.
    """

    def __init__(
        self,
        configuration: Configuration,
        *,
        timeout_s: float,
        user_agent: str,
        at_once: int = AT_ONCE,
        load: Callable[[], Awaitable[Configuration]] = load_configuration,
    ) -> None:
        self._deadline: dict[str, Any] = {"_request_timeout": aiohttp.ClientTimeout(total=timeout_s)}
        self._user_agent = user_agent
        self._turns = asyncio.Semaphore(at_once)
        self._renewing = asyncio.Lock()
        self._load = load
        self._client = self._connected(configuration)
        self._former: ApiClient | None = None  # calls may still be on their way by it

    async def close(self) -> None:
        """Ends all connections."""
        for client in filter(None, (self._client, self._former)):
            await client.close()  # type: ignore[no-untyped-call]

    async def get(self, resource: Resource, namespace: str, name: str, *, metadata_only: bool = False) -> Raw:
        accept = _METADATA if metadata_only else ""
        return await self._call("GET", _path(resource, namespace, name), accept=accept)

    async def list_all(
        self, resource: Resource, namespace: str = "", *, labels: str = "", fields: str = "", metadata_only: bool = False
    ) -> list[Raw]:
        path, select = _path(resource, namespace), {"labelSelector": labels, "fieldSelector": fields}
        accept = _METADATA_LIST if metadata_only else ""
        try:
            items = await self._pages(path, {**select, "limit": str(PAGE)}, accept)
        except GoneError:  # the list changed for so long that its next page is lost
            items = await self._pages(path, {**select, "limit": "0"}, accept)
        for item in items:  # the items of a list do not repeat what they are
            item["apiVersion"], item["kind"] = resource.api_version, resource.kind
        return items

    async def create(self, resource: Resource, body: Raw) -> Raw:
        return await self._call("POST", _path(resource, body["metadata"].get("namespace", "")), body=body)

    async def apply(self, resource: Resource, body: Raw, *, manager: str, force: bool = True, subresource: str = "") -> Raw:
        path = _path(resource, body["metadata"].get("namespace", ""), body["metadata"]["name"], subresource)
        query = {"fieldManager": manager, "force": str(force).lower()}
        return await self._call("PATCH", path, query, _as_yaml(body), content=_APPLY)

    async def patch(
        self, resource: Resource, namespace: str, name: str, body: Raw, *, content: Content = Content.MERGE
    ) -> Raw:
        return await self._call("PATCH", _path(resource, namespace, name), body=body, content=content)

    async def delete(
        self, resource: Resource, namespace: str, name: str, *, uid: str = "", grace_s: int | None = None
    ) -> None:
        options: Raw = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        if uid:
            options["preconditions"] = {"uid": uid}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        await self._call("DELETE", _path(resource, namespace, name), body=options)

    async def _pages(self, path: str, query: dict[str, str], accept: str) -> list[Raw]:
        items: list[Raw] = []
        while True:
            answer = await self._call("GET", path, query, accept=accept)
            items += answer.get("items") or ()
            following = answer["metadata"].get("continue", "")
            if not following:
                return items
            query["continue"] = following

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Raw | bytes | None = None,
        *,
        content: str = "application/json",
        accept: str = "",
    ) -> Raw:
        url = f"{path}?{urlencode({k: v for k, v in (query or {}).items() if v})}"
        headers = {"Accept": accept or "application/json", "Content-Type": content}
        try:
            async with self._turns:
                client = self._client  # only now: it may have been renewed while this call waited
                request: Any = await client.param_serialize(
                    method, url, header_params=headers, body=body, auth_settings=["BearerToken"]
                )
                response: Any = await client.call_api(*request, **self._deadline)
                status, answer = response.status, await response.read()
        except _UNREACHABLE as error:
            raise UnavailableError(f"{method} {path}: {str(error) or type(error).__name__}") from error
        if status == 401:
            await self._renew(client)
        if status >= 300:
            raise _refusal(f"{method} {path}", status, answer)
        try:
            return msgspec.json.decode(answer, type=dict[str, Any])
        except msgspec.DecodeError as error:  # somebody else answers in the server's place: nothing is known by that
            raise UnavailableError(f"{method} {path}: {status}, but no object: {answer[:_QUOTED]!r}") from error

    async def _renew(self, refused: ApiClient) -> None:
        """Once for all calls that were refused. UnavailableError: there are no credentials just now."""
        async with self._renewing:
            if refused is not self._client:
                return
            _log.warning("the API server refused our credentials; reading them again")
            try:
                self._client = self._connected(await self._load())
            except SettingsError as error:
                raise UnavailableError(f"credentials were refused, and reading them again failed: {error}") from error
            if self._former is not None:
                await self._former.close()  # type: ignore[no-untyped-call]
            self._former = refused

    def _connected(self, configuration: Configuration) -> ApiClient:
        client = ApiClient(configuration)
        client.user_agent = self._user_agent
        return client


def _path(resource: Resource, namespace: str, name: str = "", subresource: str = "") -> str:
    root = f"/apis/{resource.api_version}" if resource.group else f"/api/{resource.api_version}"
    place = f"/namespaces/{namespace}" if resource.namespaced and namespace else ""
    return "/".join(part for part in (f"{root}{place}/{resource.plural}", name, subresource) if part)


def _as_yaml(body: Raw) -> bytes:
    """The server reads what is applied as YAML: without pairs of surrogates, and some characters only if escaped."""
    text = json.dumps(body, ensure_ascii=False)
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode()


def _refusal(what: str, status: int, answer: bytes) -> Exception:
    said = _decoded(answer)
    message = str(said.get("message") or answer[:_QUOTED].decode(errors="replace") or "no reason given")
    return error_of(status, str(said.get("reason", "")), f"{what}: {status}: {message}")


def _decoded(answer: bytes) -> Raw:
    """{} for what is no JSON object: proxies answer in HTML."""
    try:
        return msgspec.json.decode(answer, type=dict[str, Any]) if answer else {}
    except msgspec.DecodeError:
        return {}
