"""What the operator knows of one pool at one moment: all that `plan()` may look at.

Objects of the Kubernetes API stay raw (`Raw`): `plan()` reads few fields of them and compares the rest as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from prefixpool.wire import Info

Raw = dict[str, Any]  # one object of the Kubernetes API, as JSON
Key = tuple[str, str]  # (kind, name) of a child; all are in the pool's namespace


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """What matters of one node. Figures of accelerators come from its labels or from its ResourceSlices."""

    name: str
    ready: bool
    labels: Mapping[str, str] = {}
    allocatable: Mapping[str, int] = {}  # resource → count, or bytes for memory and ephemeral-storage
    accelerator: str = ""  # product name; "" = none, or unknown
    accelerator_bytes: int = 0  # memory of one device; 0 = unknown
    parts: Mapping[str, int] = {}  # resource of a MIG slice → memory of one, where slices are unlike and not shared
    shared: bool = False  # devices are time-sliced, so their memory is not one pod's own


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What rendering takes from the operator's own settings. None of it restarts an engine: templates are pinned."""

    worker_image: str
    router_image: str
    operator_namespace: str = ""  # the operator's pods there may reach agents through the network policy; "" = from anywhere
    render_rbac: bool = True  # Role and RoleBinding of the router are made by the operator
    image_pull_policy: str = "IfNotPresent"


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """A missing object is absent from `children`; it must not stand for a list call that failed (raise instead)."""

    pool: Raw  # the whole InferencePool: metadata with managedFields, spec, status
    children: Mapping[Key, Raw] = {}  # every object of ours, by label or by owner, pods and claims excepted
    taken: frozenset[Key] = frozenset()  # names that a child needs and somebody else's object has
    pods: tuple[Raw, ...] = ()  # of StatefulSet, router Deployment and inspection Job
    claims: tuple[Raw, ...] = ()  # PersistentVolumeClaims of the StatefulSet
    nodes: tuple[Node, ...] | None = None  # None: the operator may not list nodes
    infos: Mapping[str, Info] = {}  # of agents that answered, by pod name
    warnings: tuple[Raw, ...] = ()  # Events about what does not come up (see `hindrances`), where they may be read
    refused: str = ""  # an action of the last look, in the API server's words
    now_s: float  # wall clock, seconds since 1970
    settings: Settings
