"""Replicas as Kubernetes tells of them: EndpointSlices of the pool's headless Service become members. Pure.

A pod may be in several slices: one for each address family, two for a moment while it moves, and a replaced pod beside its
successor of the same name. Because the Service publishes addresses that are not ready, `ready` says little; what is
terminating is not to be chosen any more, and the rest is for agents to tell. What no controller would write (an address
that is none, a name that no pool gives) is passed over: it must not end a router that serves the others.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from ipaddress import ip_address
from typing import Final, NamedTuple

import msgspec

from prefixpool import names
from prefixpool.listening import in_url
from prefixpool_router.membership import Member, MemberState

ENGINE_PORT: Final = "engine"  # names of the Service's ports
AGENT_PORT: Final = "agent"
SERVICE_LABEL: Final = "kubernetes.io/service-name"
_FAMILIES: Final = ("IPv4", "IPv6")  # in the order of preference; FQDN slices are none of a pool's
_NAME: Final = re.compile(names.REPLICA_NAME)
_LAST_PORT: Final = 65_535


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    """Of a slice, or of a list of them (`continue_`: where its next page begins)."""

    name: str = ""
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class Conditions(msgspec.Struct, frozen=True):
    """None: unknown, which the API wants to be read as ready and not terminating."""

    ready: bool | None = None
    terminating: bool | None = None


class TargetRef(msgspec.Struct, frozen=True):
    """The pod."""

    name: str = ""
    uid: str = ""


class Endpoint(msgspec.Struct, frozen=True, rename="camel"):
    """One pod's addresses of one family."""

    addresses: tuple[str, ...] | None = None
    conditions: Conditions = Conditions()
    hostname: str | None = None
    target_ref: TargetRef | None = None


class Port(msgspec.Struct, frozen=True):
    """Of all endpoints of a slice."""

    name: str | None = None
    port: int | None = None


class EndpointSlice(msgspec.Struct, frozen=True, rename="camel"):
    """discovery.k8s.io/v1, as far as it matters here."""

    metadata: Metadata
    address_type: str = ""
    endpoints: tuple[Endpoint, ...] | None = None
    ports: tuple[Port, ...] | None = None


class _Sighting(NamedTuple):
    """One pod in one slice."""

    member: Member
    pod: str  # uid
    family: int  # index in _FAMILIES
    version: int  # of the slice: the higher, the newer


def members_of(slices: Iterable[EndpointSlice]) -> tuple[Member, ...]:
    """One member for each name, sorted by name. The name is the pod's: an address says nothing about who is there."""
    by_name: dict[str, list[_Sighting]] = defaultdict(list)
    for each in slices:
        for sighting in _sightings(each):
            by_name[sighting.member.name].append(sighting)
    return tuple(_resolved(by_name[name]) for name in sorted(by_name))


def portless(slices: Iterable[EndpointSlice]) -> str:
    """A slice with endpoints, but without a port for engines: the Service is not a pool's. "" if there is none."""
    return next((each.metadata.name for each in slices if each.endpoints and not _ports(each).get(ENGINE_PORT)), "")


def _sightings(each: EndpointSlice) -> Iterable[_Sighting]:
    ports = _ports(each)
    engine, agent = ports.get(ENGINE_PORT), ports.get(AGENT_PORT)
    if not engine or each.address_type not in _FAMILIES:
        return
    family, version = _FAMILIES.index(each.address_type), _version(each.metadata)
    for endpoint in each.endpoints or ():
        pod = endpoint.target_ref or TargetRef()
        name = endpoint.hostname or pod.name
        host = _host(endpoint.addresses[0], family) if endpoint.addresses else ""
        if not host or not _NAME.fullmatch(name):
            continue
        member = Member(
            name=name,
            engine=f"http://{host}:{engine}",
            agent=f"http://{host}:{agent}" if agent else None,
            state=_state(endpoint.conditions),
        )
        yield _Sighting(member, pod.uid, family, version)


def _resolved(sightings: Sequence[_Sighting]) -> Member:
    by_pod: dict[str, list[_Sighting]] = defaultdict(list)
    for sighting in sightings:
        by_pod[sighting.pod].append(sighting)
    return max((_one_pod(each) for each in by_pod.values()), key=_precedence).member


def _one_pod(sightings: Sequence[_Sighting]) -> _Sighting:
    """The newest word of its preferred family; but terminating is never taken back."""
    best = min(sightings, key=lambda each: (each.family, -each.version, each.member.engine, each.member.state))
    if any(each.member.state is MemberState.TERMINATING for each in sightings):
        return best._replace(member=msgspec.structs.replace(best.member, state=MemberState.TERMINATING))
    return best


def _precedence(sighting: _Sighting) -> tuple[bool, int, str]:
    """Of two pods of one name: the one that stays, then the newer; else any, but the same for all routers."""
    return sighting.member.state is not MemberState.TERMINATING, sighting.version, sighting.pod


def _host(address: str, family: int) -> str:
    """As in a URL; "" for what is no address of the family."""
    try:
        version = ip_address(address).version
    except ValueError:
        return ""
    if _FAMILIES[family] != f"IPv{version}" or "%" in address:
        return ""
    return in_url(address)


def _state(conditions: Conditions) -> MemberState:
    if conditions.terminating:
        return MemberState.TERMINATING
    return MemberState.NOT_READY if conditions.ready is False else MemberState.READY


def _ports(each: EndpointSlice) -> dict[str, int]:
    return {port.name: port.port for port in each.ports or () if port.name and port.port and 0 < port.port <= _LAST_PORT}


def _version(metadata: Metadata) -> int:
    # Opaque in theory; in practice etcd's revision, which Kubernetes 1.35 promises to be comparable.
    return int(metadata.resource_version) if metadata.resource_version.isdecimal() else 0
