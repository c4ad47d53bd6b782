"""What is to be done: the shell executes these one after the other and decides nothing. Each says why, in words.

An action that fails is not repeated by hand: the next reconcile plans it anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

import msgspec

from prefixpool_operator.observed import Raw

FIELD_MANAGER: Final = "prefixpool-operator"


class Apply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Server-side apply of a child, as `FIELD_MANAGER`, with force unless `absent`.

    `absent`: the plan knows of no such object. If there is one, the shell does nothing at all, and the next look is told of
    the name: the object is in `Observed.taken`, or is the pool's own that lost its label and is in `Observed.children`.
    """

    object: Raw
    reason: str
    absent: bool = False


class CreateOnce(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Create a Secret; one that exists already is success and stays as it is.

    `random_keys`: data keys that the shell fills with fresh random text (32 bytes, URL-safe base64, no newline).
    """

    object: Raw
    random_keys: tuple[str, ...]
    reason: str


class Delete(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Delete with preconditions.uid, propagation Background; absent or another uid is success."""

    api_version: str
    kind: str
    name: str
    uid: str
    reason: str


class PatchImage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Strategic merge patch of a running pod: spec.initContainers[name=container].image. No other container restarts.

    `annotations` go into the same patch; `uid` is its metadata.uid, so that another pod of that name is left alone.
    """

    pod: str
    uid: str
    container: str
    image: str
    annotations: Mapping[str, str]
    reason: str


class FillReplicas(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Server-side apply of the pool's spec.replicas as `FIELD_MANAGER`, not forced: a conflict means another owner won."""

    replicas: int
    reason: str


Action = Apply | CreateOnce | Delete | PatchImage | FillReplicas


class EventType(StrEnum):
    """Types that Kubernetes knows."""

    NORMAL = "Normal"
    WARNING = "Warning"


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """What a person should know. Planned on changes only, so it is safe to post each."""

    type: EventType
    reason: str  # CamelCase
    message: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Order of execution: actions, then status (if changed), then events; `done` only where no action failed."""

    actions: tuple[Action, ...] = ()
    status: Raw  # the whole new status of the pool
    status_changed: bool  # False: write nothing
    done: tuple[Event, ...] = ()  # what the actions did
    events: tuple[Event, ...] = ()  # how things stand
    wake_after_s: float | None = None  # a deadline falls due then; None: only a change can matter
