"""The watch on EndpointSlices against an API server with bad days. Deadlines are short here; what they do is the same."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from prefixpool.errors import SettingsError
from prefixpool_router.kubernetes_api import ApiServer, Deadlines
from prefixpool_router.kubernetes_members import KubernetesMembers, api_server
from prefixpool_router.membership import MemberState
from prefixpool_router.settings import RouterSettings
from prefixpool_testing.fake_endpoint_slices import (
    NAMESPACE,
    SERVICE,
    FakeEndpointSlices,
    endpoint,
    endpoint_slice,
    listening,
)
from prefixpool_testing.following import following

RECONNECTED_S = 5.0  # promised: within this time of a connection, what is known is right


def source(url: str, folder: Path, deadlines: Deadlines = Deadlines()) -> KubernetesMembers:  # noqa: B008 (immutable)
    return KubernetesMembers(ApiServer(url, NAMESPACE, SERVICE, folder / "token", ""), deadlines=deadlines, draw=lambda: 0.0)


@pytest.fixture
async def api() -> AsyncIterator[FakeEndpointSlices]:
    fake = FakeEndpointSlices()
    async with listening(fake):
        yield fake


async def test_a_list_then_every_change(api: FakeEndpointSlices, tmp_path: Path) -> None:
    await api.put(endpoint_slice("a", endpoint("pool-0")), endpoint_slice("web", endpoint("web-0"), service="web"))
    async with following(source(api.url, tmp_path)) as follower:
        await follower.knows("pool-0")
        await api.put(endpoint_slice("b", endpoint("pool-1", "10.0.0.2")))
        await follower.knows("pool-0", "pool-1")
        await api.put(endpoint_slice("a", endpoint("pool-0", terminating=True)))
        await follower.until(
            lambda: follower.members["pool-0"].state is MemberState.TERMINATING, what="pool-0 is terminating"
        )
        await api.delete("a")
        await follower.knows("pool-1")
    assert [request.get("watch") for request in api.requests] == [None, "1"]


async def test_a_pool_without_replicas_is_known_to_be_empty(api: FakeEndpointSlices, tmp_path: Path) -> None:
    async with following(source(api.url, tmp_path)) as follower:
        await follower.knows()
        assert follower.source.problem == ""


async def test_lists_come_in_pages(api: FakeEndpointSlices, tmp_path: Path) -> None:
    api.page_slices = 2
    await api.put(*(endpoint_slice(f"s{n}", endpoint(f"pool-{n}", f"10.0.0.{n}")) for n in range(5)))
    async with following(source(api.url, tmp_path)) as follower:
        await follower.knows(*(f"pool-{n}" for n in range(5)))
    assert len(follower.sets) == 1


async def test_changes_that_mean_nothing_to_routers_are_not_told(api: FakeEndpointSlices, tmp_path: Path) -> None:
    await api.put(endpoint_slice("a", endpoint("pool-0")))
    async with following(source(api.url, tmp_path)) as follower:
        await follower.knows("pool-0")
        await api.put(endpoint_slice("a", endpoint("pool-0", serving=False)))
        await api.put(endpoint_slice("b", endpoint("pool-1")))
        await follower.knows("pool-0", "pool-1")
    assert len(follower.sets) == 2


async def test_a_watch_goes_on_from_the_last_bookmark(api: FakeEndpointSlices, tmp_path: Path) -> None:
    async with following(source(api.url, tmp_path, Deadlines(watch=1.0))) as follower:
        await follower.knows()
        await api.bookmark()
        await follower.until(lambda: len(api.requests) >= 3, what="the second watch")
    since = [request["resourceVersion"] for request in api.requests if "watch" in request]
    assert since[:2] == ["100", "101"]
    assert sum("watch" not in request for request in api.requests) == 1, "it need not list again"


async def test_a_version_that_is_too_old_means_another_list(api: FakeEndpointSlices, tmp_path: Path) -> None:
    api.forgetful = True
    await api.put(endpoint_slice("a", endpoint("pool-0")))
    async with following(source(api.url, tmp_path)) as follower:
        await follower.until(lambda: len(api.requests) >= 4, what="two lists")
        assert follower.source.problem == ""
        api.forgetful = False
        await api.put(endpoint_slice("b", endpoint("pool-1")))
        await follower.knows("pool-0", "pool-1", within_s=RECONNECTED_S)


async def test_a_member_deleted_while_nobody_watched_is_gone_once_connected(tmp_path: Path) -> None:
    fake = FakeEndpointSlices()
    await fake.put(endpoint_slice("a", endpoint("pool-0")), endpoint_slice("b", endpoint("pool-1")))
    async with listening(fake) as url, following(source(url, tmp_path)) as follower:
        await follower.knows("pool-0", "pool-1")
        fake.status = 500
        await fake.drop_watches()
        await fake.delete("b")
        await follower.problem("answers 500: told so")
        assert list(follower.members) == ["pool-0", "pool-1"]
        fake.status = 0
        await follower.knows("pool-0", within_s=RECONNECTED_S)
        assert follower.source.problem == ""


async def test_the_last_set_stays_in_force_while_the_api_server_is_away(tmp_path: Path) -> None:
    fake = FakeEndpointSlices()
    await fake.put(endpoint_slice("a", endpoint("pool-0")))
    async with listening(fake) as url, following(source(url, tmp_path)) as follower:
        await follower.knows("pool-0")
        await fake.stop()
        await follower.problem("no connection to")
        await fake.put(endpoint_slice("b", endpoint("pool-1")))
        assert list(follower.members) == ["pool-0"]
        await fake.start()
        await follower.knows("pool-0", "pool-1", within_s=RECONNECTED_S)
        assert follower.source.problem == ""


async def test_an_api_server_of_a_host_that_no_name_can_be_ended_the_router(tmp_path: Path) -> None:
    async with following(source("http://a..b:1", tmp_path)) as follower:
        await follower.problem("no connection to http://a..b:1")


async def test_a_token_that_is_no_text_ended_the_router(api: FakeEndpointSlices, tmp_path: Path) -> None:
    (tmp_path / "token").write_bytes(b"\xff\xfe")
    await api.put(endpoint_slice("a", endpoint("pool-0")))
    async with following(source(api.url, tmp_path)) as follower:
        await follower.knows("pool-0")


async def test_a_list_that_never_comes_is_given_up_and_tried_again(api: FakeEndpointSlices, tmp_path: Path) -> None:
    api.slow = True
    async with following(source(api.url, tmp_path, Deadlines(answer=0.1))) as follower:
        await follower.problem("did not answer within 0.1 s")
        api.slow = False
        await follower.knows()


async def test_a_watch_that_hears_nothing_at_all_is_not_believed(api: FakeEndpointSlices, tmp_path: Path) -> None:
    api.silent = True
    async with following(source(api.url, tmp_path, Deadlines(silence=0.1))) as follower:
        await follower.knows()
        await api.put(endpoint_slice("a", endpoint("pool-0")))
        await follower.knows("pool-0")
        assert follower.source.problem == ""


async def test_watches_that_end_at_once_are_a_problem_not_a_loop(api: FakeEndpointSlices, tmp_path: Path) -> None:
    api.curt = True
    async with following(source(api.url, tmp_path)) as follower:
        await follower.problem("ended it at once")
        assert len(api.requests) == 2


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (401, "cannot be read"),
        (403, "apiGroups [discovery.k8s.io], resources [endpointslices], verbs [get, list, watch] in namespace models"),
        (404, "answers 404: told so"),
        (500, "answers 500: told so"),
    ],
)
async def test_refusals_say_what_is_missing(api: FakeEndpointSlices, tmp_path: Path, status: int, says: str) -> None:
    api.status = status
    async with following(source(api.url, tmp_path)) as follower:
        await follower.problem(says)
        assert follower.sets == []
        api.status = 0
        await follower.knows()


async def test_the_token_is_read_anew_for_each_request(tmp_path: Path) -> None:
    fake, token = FakeEndpointSlices("second"), tmp_path / "token"
    token.write_text("first\n")
    async with listening(fake) as url, following(source(url, tmp_path)) as follower:
        await follower.problem(f"the token in {token} is not accepted")
        token.write_text("second\n")
        await follower.knows()
    assert "first" not in follower.source.problem


async def test_nonsense_is_a_problem_not_a_crash(api: FakeEndpointSlices, tmp_path: Path) -> None:
    await api.put({"metadata": {"name": "a", "labels": {"kubernetes.io/service-name": SERVICE}}, "endpoints": "none"})
    async with following(source(api.url, tmp_path)) as follower:
        await follower.problem("sent no EndpointSlices")
        await api.put(endpoint_slice("a", endpoint("pool-0")))
        await follower.knows("pool-0")


async def test_a_service_that_is_no_pool_is_a_problem(api: FakeEndpointSlices, tmp_path: Path) -> None:
    await api.put(endpoint_slice("a", endpoint("web-0"), ports={"http": 80}))
    async with following(source(api.url, tmp_path)) as follower:
        await follower.problem("EndpointSlice a has no port `engine`")


async def test_nothing_is_left_open(api: FakeEndpointSlices, tmp_path: Path) -> None:
    async with following(source(api.url, tmp_path)) as follower:
        await follower.knows()
        await follower.until(lambda: api.watches == 1, what="a watch")
    await follower.until(lambda: api.watches == 0, what="the watch has ended")


# -- where the API server is

IN_A_POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}


def settings(**values: str) -> RouterSettings:
    return RouterSettings(**{"kubernetes_service": SERVICE, **values})  # type: ignore[arg-type]


def test_a_pod_finds_everything_in_its_service_account(tmp_path: Path) -> None:
    (tmp_path / "namespace").write_text("models\n")
    server = api_server(settings(kubernetes_token_file=str(tmp_path / "token")), IN_A_POD)
    assert server[:4] == ("https://10.96.0.1:443", "models", SERVICE, tmp_path / "token")


def test_an_api_server_of_ipv6_is_in_brackets(tmp_path: Path) -> None:
    server = api_server(settings(kubernetes_namespace="n"), {**IN_A_POD, "KUBERNETES_SERVICE_HOST": "fd00::1"})
    assert server.url == "https://[fd00::1]:443"


@pytest.mark.parametrize(
    ("values", "env", "says"),
    [
        ({"kubernetes_namespace": "n"}, {}, "--kubernetes-url is needed"),
        ({"kubernetes_token_file": "/nowhere/token"}, IN_A_POD, "--kubernetes-namespace is needed: /nowhere/namespace"),
        ({"kubernetes_namespace": "n", "kubernetes_url": "10.0.0.1:6443"}, {}, "expected https://HOST:PORT"),
        ({"kubernetes_namespace": "Team A"}, IN_A_POD, "--kubernetes-namespace 'Team A': expected lower-case"),
        ({"kubernetes_namespace": "n", "kubernetes_service": "a/b"}, IN_A_POD, "--kubernetes-service 'a/b': expected"),
    ],
)
def test_what_is_missing_is_named(values: dict[str, str], env: dict[str, str], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        api_server(settings(**values), env)


async def test_a_certificate_file_that_is_missing_is_named(tmp_path: Path) -> None:
    server = ApiServer("https://127.0.0.1:1", NAMESPACE, SERVICE, tmp_path / "token", str(tmp_path / "ca.crt"))
    async with following(KubernetesMembers(server)) as follower:
        await follower.problem("ca.crt: No such file")
