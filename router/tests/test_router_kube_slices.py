"""From EndpointSlices to members. No I/O."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixpool_router.endpoint_slices import EndpointSlice, members_of, portless
from prefixpool_router.membership import Member, MemberState, check_members
from prefixpool_testing.fake_endpoint_slices import endpoint, endpoint_slice

Object = dict[str, Any]


def read(*slices: Object) -> list[EndpointSlice]:
    """Versions grow in the order given."""
    for version, each in enumerate(slices, 1):
        each["metadata"].setdefault("resourceVersion", str(version))
    return [msgspec.json.decode(json.dumps(each), type=EndpointSlice) for each in slices]


def members(*slices: Object) -> tuple[Member, ...]:
    return members_of(read(*slices))


def states(*slices: Object) -> dict[str, tuple[str, str]]:
    return {member.name: (member.engine, member.state.value) for member in members(*slices)}


def test_an_endpoint_is_a_replica_with_the_ports_of_its_slice() -> None:
    ports = {"router": 8000, "agent": 9101, "engine": 9100}
    assert members(endpoint_slice("a", endpoint("pool-0", "10.1.2.3"), ports=ports)) == (
        Member(name="pool-0", engine="http://10.1.2.3:9100", agent="http://10.1.2.3:9101"),
    )


def test_a_service_without_a_port_for_agents_has_replicas_without_agents() -> None:
    assert members(endpoint_slice("a", endpoint("pool-0"), ports={"engine": 8100}))[0].agent is None


def test_addresses_of_ipv6_are_in_brackets() -> None:
    found = members(endpoint_slice("a", endpoint("pool-0", "fd00::1:2"), family="IPv6"))
    assert found[0].engine == "http://[fd00::1:2]:8100"
    assert check_members(found) == found


@pytest.mark.parametrize(
    ("conditions", "state"),
    [
        ({}, MemberState.READY),
        ({"ready": None, "terminating": None}, MemberState.READY),
        ({"ready": False}, MemberState.NOT_READY),
        ({"ready": True, "terminating": True}, MemberState.TERMINATING),  # the Service publishes what is not ready
        ({"ready": False, "serving": True, "terminating": True}, MemberState.TERMINATING),
    ],
)
def test_conditions_become_states(conditions: dict[str, Any], state: MemberState) -> None:
    assert members(endpoint_slice("a", endpoint("pool-0", **conditions)))[0].state is state


def test_conditions_that_are_missing_mean_ready() -> None:
    bare = endpoint("pool-0")
    del bare["conditions"]
    assert members(endpoint_slice("a", bare))[0].state is MemberState.READY


def test_the_pod_gives_the_name_where_the_endpoint_has_none() -> None:
    nameless = endpoint("pool-0")
    del nameless["hostname"]
    assert [member.name for member in members(endpoint_slice("a", nameless))] == ["pool-0"]


@pytest.mark.parametrize(
    "broken",
    [
        endpoint_slice("a", {**endpoint("pool-0"), "addresses": []}),
        endpoint_slice("a", {**endpoint("pool-0"), "addresses": None}),
        endpoint_slice("a", {"addresses": ["10.0.0.1"]}),
        endpoint_slice("a", endpoint("pool-0", "pool-0.example"), family="FQDN"),
        endpoint_slice("a", endpoint("pool-0"), ports={"http": 80}),
        {**endpoint_slice("a"), "endpoints": None, "ports": None},
    ],
)
def test_what_cannot_be_reached_is_no_member(broken: Object) -> None:
    assert members(broken) == ()


@pytest.mark.parametrize(
    "strange",
    [
        *(
            endpoint("odd", address)
            for address in ("999.1.1.1", "not an ip", "", "10.0.0.1/../x?y", "user:pw@host", "fd00::1")
        ),
        *(endpoint(name) for name in ("a/b", "é", "a b", "x" * 300, "line\nbreak")),
    ],
)
def test_a_strange_endpoint_ended_the_router_and_is_passed_over(strange: Object) -> None:
    assert [member.name for member in members(endpoint_slice("a", strange, endpoint("pool-0")))] == ["pool-0"]


def test_strange_ports_and_addresses_of_ipv6_are_passed_over() -> None:
    assert members(endpoint_slice("a", endpoint("pool-0"), ports={"engine": 70_000})) == ()
    assert members(endpoint_slice("a", endpoint("pool-0"), ports={"engine": 8100, "agent": -1}))[0].agent is None
    for address in ("fe80::1%eth0", "10.0.0.1", "::zz"):
        assert members(endpoint_slice("a", endpoint("pool-0", address), family="IPv6")) == ()


def test_a_slice_of_a_service_that_is_no_pool_is_named() -> None:
    assert portless(read(endpoint_slice("web-x", endpoint("web-0"), ports={"http": 80}))) == "web-x"
    assert portless(read(endpoint_slice("empty", ports={}), endpoint_slice("a", endpoint("pool-0")))) == ""


def test_slices_add_up() -> None:
    found = members(endpoint_slice("b", endpoint("pool-2")), endpoint_slice("a", endpoint("pool-0"), endpoint("pool-1")))
    assert [member.name for member in found] == ["pool-0", "pool-1", "pool-2"]


def test_a_pod_of_two_families_is_one_member() -> None:
    six = endpoint_slice("six", endpoint("pool-0", "fd00::1"), family="IPv6")
    assert states(endpoint_slice("four", endpoint("pool-0", "10.0.0.7")), six) == {
        "pool-0": ("http://10.0.0.7:8100", "ready")
    }


def test_of_two_slices_with_one_pod_the_newer_is_right() -> None:
    old, new = endpoint("pool-0", "10.0.0.1", ready=False), endpoint("pool-0", "10.0.0.1")
    assert states(endpoint_slice("b", old), endpoint_slice("a", new)) == {"pool-0": ("http://10.0.0.1:8100", "ready")}


def test_terminating_is_never_taken_back() -> None:
    ending, older = endpoint("pool-0", terminating=True), endpoint("pool-0")
    assert states(endpoint_slice("a", ending), endpoint_slice("b", older))["pool-0"][1] == "terminating"


def test_a_replaced_pod_gives_way_to_its_successor_of_the_same_name() -> None:
    old = endpoint("pool-0", "10.0.0.1", uid="old", terminating=True)
    new = endpoint("pool-0", "10.0.0.9", uid="new")
    for slices in itertools.permutations([endpoint_slice("a", old), endpoint_slice("b", new)]):
        assert states(*map(dict, slices)) == {"pool-0": ("http://10.0.0.9:8100", "ready")}
    assert states(endpoint_slice("a", old, new)) == {"pool-0": ("http://10.0.0.9:8100", "ready")}


def test_of_two_pods_that_both_stay_the_one_in_the_newer_slice_is_right() -> None:
    ghost, real = endpoint("pool-0", "10.0.0.1", uid="ghost"), endpoint("pool-0", "10.0.0.9", uid="real")
    assert states(endpoint_slice("a", ghost), endpoint_slice("b", real)) == {"pool-0": ("http://10.0.0.9:8100", "ready")}


ENDPOINTS = st.builds(
    lambda name, address, uid, ready, terminating: endpoint(
        f"pool-{name}", f"10.0.0.{address}", uid=uid, ready=ready, terminating=terminating
    ),
    st.integers(0, 3),
    st.integers(1, 4),
    st.sampled_from("ab"),
    st.booleans(),
    st.booleans(),
)


@given(st.lists(st.lists(ENDPOINTS, max_size=4), max_size=4), st.randoms())
def test_whatever_slices_say_each_name_is_one_member_and_order_does_not_matter(
    slices: list[list[Object]], random: Any
) -> None:
    found = read(*(endpoint_slice(str(number), *each) for number, each in enumerate(slices)))
    expected = members_of(found)
    assert {member.name for member in expected} == {each["hostname"] for part in slices for each in part}
    assert check_members(expected) == expected
    random.shuffle(found)
    assert members_of(found) == expected
