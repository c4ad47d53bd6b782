"""The API seam over real HTTP, against a server that answers as scripted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import Configuration

from prefixpool.errors import SettingsError
from prefixpool_operator import kube
from prefixpool_operator.kube import Content, KubeError, UnavailableError
from prefixpool_operator.kube_client import AT_ONCE, PAGE, KubeClient, load_configuration

SERVICE = kube.resource_of("Service")
STATUS = {"kind": "Status", "reason": "SomeReason", "message": "so it is"}


class Request:
    """What arrived."""

    def __init__(self, request: web.Request, text: str) -> None:
        self.line = f"{request.method} {request.path}"
        self.query = dict(request.query)
        self.headers = request.headers
        self.text = text
        self.body = json.loads(text) if text else None


class Script:
    """Answers in order, the last one for ever."""

    def __init__(self, *answers: tuple[int, Any] | Callable[[], Awaitable[web.Response]]) -> None:
        self._answers = list(answers)
        self.asked: list[Request] = []

    async def handle(self, request: web.Request) -> web.Response:
        self.asked.append(Request(request, await request.text()))
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if callable(answer):
            return await answer()
        return web.json_response(answer[1], status=answer[0])


@asynccontextmanager
async def connected(script: Script, *, token: str = "", timeout_s: float = 5) -> AsyncIterator[KubeClient]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", script.handle)
    async with TestServer(app) as server:
        tokens = iter(("renewed",))

        def configuration(token: str) -> Configuration:
            made = Configuration(host=f"http://127.0.0.1:{server.port}")
            if token:
                made.api_key["BearerToken"] = f"Bearer {token}"
            return made

        async def load() -> Configuration:
            return configuration(next(tokens))

        client = KubeClient(configuration(token), timeout_s=timeout_s, user_agent="test", load=load)
        try:
            yield client
        finally:
            await client.close()


async def test_paths_of_all_kinds_of_kinds() -> None:
    script = Script((200, {}))
    async with connected(script) as api:
        await api.get(kube.POOL, "ns", "p")
        await api.get(kube.SECRET, "ns", "p-keys")
        await api.get(kube.NODE, "", "n")
    assert [asked.line for asked in script.asked] == [
        "GET /apis/prefixpool.dev/v1alpha1/namespaces/ns/inferencepools/p",
        "GET /api/v1/namespaces/ns/secrets/p-keys",
        "GET /api/v1/nodes/n",
    ]
    assert script.asked[0].headers["User-Agent"] == "test"


async def test_server_side_apply_names_its_manager_and_says_whether_it_takes_by_force() -> None:
    script = Script((200, {}))
    body = {"metadata": {"name": "p", "namespace": "ns"}, "spec": {"ports": []}}
    async with connected(script) as api:
        await api.apply(SERVICE, body, manager="m")
        await api.apply(kube.POOL, body, manager="m", force=False, subresource="status")
    first, second = script.asked
    assert first.line == "PATCH /api/v1/namespaces/ns/services/p"
    assert first.query == {"fieldManager": "m", "force": "true"}
    assert first.headers["Content-Type"].startswith(Content.APPLY)
    assert first.body == body
    assert second.line.endswith("/inferencepools/p/status")
    assert second.query["force"] == "false"


async def test_text_that_yaml_reads_only_as_it_is_and_text_that_it_reads_only_escaped() -> None:
    script = Script((200, {}))
    body = {
        "metadata": {"name": "p"},
        "spec": {"emoji": "🐎 žluť", "control": "\x00\x7f\x85\u2028\ufeff", "path": "\\ud83d"},
    }
    async with connected(script) as api:
        await api.apply(SERVICE, body, manager="m")
    (asked,) = script.asked
    assert asked.body == body
    assert yaml.safe_load(asked.text) == body
    assert "🐎" in asked.text


async def test_patches_keep_their_kind() -> None:
    script = Script((200, {}))
    async with connected(script) as api:
        await api.patch(kube.POD, "ns", "p-0", {"a": 1}, content=Content.STRATEGIC)
        await api.patch(kube.LEASE, "ns", "l", {"a": 1})
    assert [asked.headers["Content-Type"] for asked in script.asked] == [Content.STRATEGIC, Content.MERGE]


async def test_a_delete_means_one_object() -> None:
    script = Script((200, {}))
    async with connected(script) as api:
        await api.delete(kube.POD, "ns", "p-0", uid="u", grace_s=0)
    assert script.asked[0].body["preconditions"] == {"uid": "u"}
    assert script.asked[0].body["gracePeriodSeconds"] == 0
    assert script.asked[0].body["propagationPolicy"] == "Background"


async def test_lists_are_read_in_pages_and_say_what_their_items_are() -> None:
    script = Script(
        (200, {"metadata": {"continue": "more"}, "items": [{"metadata": {"name": "a"}}]}),
        (200, {"metadata": {}, "items": [{"metadata": {"name": "b"}}]}),
    )
    async with connected(script) as api:
        items = await api.list_all(SERVICE, "ns", labels="a=b")
    assert [item["metadata"]["name"] for item in items] == ["a", "b"]
    assert {(item["apiVersion"], item["kind"]) for item in items} == {("v1", "Service")}
    assert script.asked[0].query == {"labelSelector": "a=b", "limit": str(PAGE)}
    assert script.asked[1].query["continue"] == "more"


async def test_a_list_whose_next_page_is_lost_is_read_anew_as_a_whole() -> None:
    script = Script(
        (200, {"metadata": {"continue": "more"}, "items": [{"metadata": {"name": "a"}}]}),
        (410, STATUS),
        (200, {"metadata": {}, "items": [{"metadata": {"name": "b"}}]}),
    )
    async with connected(script) as api:
        assert [item["metadata"]["name"] for item in await api.list_all(SERVICE)] == ["b"]
    assert "continue" not in script.asked[-1].query


async def test_only_metadata_is_asked_for_where_that_is_enough() -> None:
    script = Script((200, {"metadata": {}, "items": None}), (200, {"metadata": {}}))
    async with connected(script) as api:
        assert await api.list_all(SERVICE, metadata_only=True) == []
        assert await api.get(SERVICE, "ns", "p", metadata_only=True) == {"metadata": {}}
    assert [one.headers["Accept"].split(";")[1] for one in script.asked] == [
        "as=PartialObjectMetadataList",
        "as=PartialObjectMetadata",
    ]
    assert [one.line for one in script.asked] == ["GET /api/v1/services", "GET /api/v1/namespaces/ns/services/p"]


@pytest.mark.parametrize(
    ("status", "reason", "error"),
    [
        (400, "BadRequest", kube.InvalidError),
        (403, "Forbidden", kube.ForbiddenError),
        (404, "NotFound", kube.NotFoundError),
        (409, "Conflict", kube.ConflictError),
        (409, "AlreadyExists", kube.AlreadyExistsError),
        (410, "Expired", kube.GoneError),
        (413, "RequestEntityTooLarge", kube.InvalidError),
        (422, "Invalid", kube.InvalidError),
        (429, "TooManyRequests", kube.UnavailableError),
        (500, "InternalError", kube.UnavailableError),
        (503, "ServiceUnavailable", kube.UnavailableError),
        (418, "Teapot", KubeError),
    ],
)
async def test_refusals_are_told_apart_with_the_servers_words(status: int, reason: str, error: type[KubeError]) -> None:
    async with connected(Script((status, {**STATUS, "reason": reason}))) as api:
        with pytest.raises(error, match="so it is") as caught:
            await api.get(SERVICE, "ns", "p")
    assert type(caught.value) is error
    assert (caught.value.status, caught.value.reason) == (status, reason)


async def test_a_field_of_a_wrong_type_is_the_objects_fault_though_the_server_answers_500() -> None:
    said = "failed to create typed patch object (ns/p): .spec.affinity: expected map, got 7"
    async with connected(Script((500, {**STATUS, "reason": "", "message": said}))) as api:
        with pytest.raises(kube.InvalidError, match="expected map"):
            await api.apply(SERVICE, {"metadata": {"name": "p"}}, manager="m")


async def test_an_answer_of_a_proxy_that_is_no_json() -> None:
    async def page() -> web.Response:
        return web.Response(status=502, text="<html>bad gateway</html>")

    async with connected(Script(page)) as api:
        with pytest.raises(kube.UnavailableError, match="bad gateway"):
            await api.get(SERVICE, "ns", "p")


async def test_no_answer_in_time_and_no_server_at_all_are_unavailable() -> None:
    release = asyncio.Event()

    async def late() -> web.Response:
        await release.wait()
        return web.json_response({})

    async with connected(Script(late), timeout_s=0.05) as api:
        with pytest.raises(kube.UnavailableError, match="GET /api/v1/namespaces/ns/services/p"):
            await api.get(SERVICE, "ns", "p")
        release.set()
    nowhere = KubeClient(Configuration(host="http://127.0.0.1:9"), timeout_s=5, user_agent="test")
    with pytest.raises(kube.UnavailableError):
        await nowhere.get(SERVICE, "ns", "p")
    await nowhere.close()


async def test_refused_credentials_are_read_again_for_the_next_call() -> None:
    script = Script((401, {**STATUS, "reason": "Unauthorized"}), (200, {}))
    async with connected(script, token="old") as api:
        with pytest.raises(KubeError):
            await api.get(SERVICE, "ns", "p")
        await api.get(SERVICE, "ns", "p")
    assert [asked.headers["Authorization"] for asked in script.asked] == ["Bearer old", "Bearer renewed"]


async def test_credentials_refused_to_many_at_once_are_read_again_once() -> None:
    """Also for calls that waited for their turn meanwhile."""
    refusals = [(401, STATUS)] * AT_ONCE
    script = Script(*refusals, (200, {}))
    async with connected(script, token="old") as api:  # which can be renewed once only
        calls = (api.get(SERVICE, "ns", str(number)) for number in range(4 * AT_ONCE))
        found = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(one, dict | KubeError) for one in found), found
    assert script.asked[-1].headers["Authorization"] == "Bearer renewed"


async def test_credentials_that_cannot_be_read_again_just_now_are_no_reason_to_end() -> None:
    async def nothing() -> Configuration:
        raise SettingsError("no kubeconfig")

    async with connected(Script((401, STATUS)), token="old") as api:
        api._load = nothing
        with pytest.raises(kube.UnavailableError, match="no kubeconfig"):
            await api.get(SERVICE, "ns", "p")


async def test_only_so_many_requests_are_on_their_way_at_once() -> None:
    """Hundreds of pools that change together must not bury a server that is slow already."""
    running, most = 0, 0

    async def count() -> web.Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return web.json_response({})

    async with connected(Script(count)) as api:
        await asyncio.gather(*(api.get(SERVICE, "ns", str(number)) for number in range(200)))
    assert 1 < most <= AT_ONCE


async def test_neither_pod_nor_kubeconfig(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setattr("kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    with pytest.raises(SettingsError, match="set KUBECONFIG"):
        await load_configuration()


@pytest.mark.parametrize("text", ["", "{{{", "[]", "7", "apiVersion: v1\nclusters: 3\ncurrent-context: a\n"])
async def test_a_broken_kubeconfig_is_told_without_a_traceback(
    text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    (tmp_path / "config").write_text(text)
    monkeypatch.setattr("kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
    with pytest.raises(SettingsError, match="no Kubernetes API server to talk to"):
        await load_configuration()


async def test_a_page_in_the_servers_place_is_no_object() -> None:
    """A proxy's, with 200: the operator took it for a Lease without a holder, and ended at the first list."""

    async def page() -> web.Response:
        return web.Response(text="<html>please log in</html>")

    async with connected(Script(page)) as client:
        with pytest.raises(UnavailableError, match="please log in"):
            await client.get(kube.LEASE, "ns", "prefixpool-operator")
        with pytest.raises(UnavailableError):
            await client.list_all(kube.POOL)
