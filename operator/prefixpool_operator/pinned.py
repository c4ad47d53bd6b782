"""A pod template changes only with the spec: the one that a spec was first rendered to is kept with the StatefulSet.

So an upgrade of the operator restarts no engine: its changed defaults take effect with the next change of the spec. The
router's image is not pinned and no part of the revision: it is changed in running pods.
"""

from __future__ import annotations

import copy
from typing import Final

import msgspec

from prefixpool.api.spec import PoolSpec
from prefixpool_operator.digest import digest, given
from prefixpool_operator.identity import A_REVISION, A_ROUTER_IMAGE, A_SPEC_HASH, A_TEMPLATE
from prefixpool_operator.observed import Raw
from prefixpool_operator.render import pods, router
from prefixpool_operator.render.blueprint import Blueprint

_NOT_IN_PODS: Final = ("replicas", "min_replicas", "max_replicas", "paused", "kv_budget", "rollout")


class Pinned(msgspec.Struct, frozen=True, kw_only=True):
    """What a StatefulSet is to make pods from."""

    template: Raw
    annotations: Raw  # of the StatefulSet, by which this is found again
    revision: str


def pinned(plan: Blueprint, mark: str, existing: Raw | None, *, hold: bool = False) -> Pinned:
    """The kept template if it was made from this spec (or `hold`), else a new one. `mark`: the spec's hash."""
    annotations = ((existing or {}).get("metadata") or {}).get("annotations") or {}
    wanted = mark
    if hold and annotations.get(A_SPEC_HASH):
        wanted = annotations[A_SPEC_HASH]
    kept = _kept(annotations) if annotations.get(A_SPEC_HASH) == wanted else None
    bare = kept or _with_router_image(pods.worker_template(plan), "")
    revision = digest(bare)
    template = _with_router_image(bare, plan.settings.router_image)
    image = {A_ROUTER_IMAGE: plan.settings.router_image} if plan.sidecars else {}
    template["metadata"]["annotations"] = {A_REVISION: revision, **image}
    text = msgspec.json.encode(bare, order="deterministic").decode()
    return Pinned(template=template, annotations={A_SPEC_HASH: wanted, A_TEMPLATE: text}, revision=revision)


def spec_hash(spec: PoolSpec) -> str:
    """Of the parts of a spec that pods are made from."""
    parts = {name: value for name, value in given(spec).items() if name not in _NOT_IN_PODS}
    found = parts.get("router", {})
    if found.get("mode") == "Deployment":  # routers apart restart no engine
        parts["router"] = {"mode": found["mode"]}
        parts.pop("auth", None)
    return digest(parts)


def _kept(annotations: Raw) -> Raw | None:
    try:
        found = msgspec.json.decode(annotations[A_TEMPLATE], type=dict)
    except (KeyError, msgspec.DecodeError):  # somebody removed or broke it: rendering anew is all that is left
        return None
    return found if found.get("spec", {}).get("containers") else None


def _with_router_image(template: Raw, image: str) -> Raw:
    changed = copy.deepcopy(template)
    for container in changed["spec"].get("initContainers") or ():
        if container["name"] == router.NAME:
            container["image"] = image
    return changed
