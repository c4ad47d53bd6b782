"""Which pods go next so that the pool reaches its revision: pure arithmetic over pods.

The StatefulSet makes a pod of the present template wherever one is missing, so deleting is all there is to decide. What is
ready is deleted only while enough others are; what is broken serves nobody and goes at once, also when a first try at a
spec was wrong and a second one comes. A revision whose pods do not get ready stops by itself: they use up what may be down.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from prefixpool.listing import listed
from prefixpool_operator.pod import Pod

_SHOWN: Final = 5  # names in a message


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What every replica should be."""

    replicas: int
    revision: str
    restarted_at: str = ""  # of the StatefulSet's template, see pod.A_RESTARTED
    router_image: str = ""  # "" = no sidecars
    max_unavailable: int = 1

    def outdated(self, pod: Pod) -> bool:
        """Whether only a new pod can be right."""
        return pod.revision != self.revision or pod.restarted_at != self.restarted_at

    def updated(self, pod: Pod) -> bool:
        return not self.outdated(pod) and not self.old_router(pod)

    def old_router(self, pod: Pod) -> bool:
        """Whether its router needs another image, which can be had in place."""
        return bool(self.router_image) and pod.router is not None and pod.router_image != self.router_image


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What to do now; the rest follows when pods have changed."""

    delete: tuple[Pod, ...] = ()
    patch: tuple[Pod, ...] = ()
    waits_for: str = ""  # why nothing happens now although there is something to do
    failing: tuple[Pod, ...] = ()  # pods of the new revision that fail: the rollout has stopped


def step(pods: Iterable[Pod], target: Target) -> Step:
    """`pods`: workers, also those that a smaller pool is about to lose (which are left to the StatefulSet)."""
    own = [pod for pod in pods if 0 <= pod.ordinal < target.replicas]
    living = [pod for pod in own if pod.terminating_s is None]
    outdated = [pod for pod in living if target.outdated(pod)]
    failing = tuple(pod for pod in living if not target.outdated(pod) and pod.failing) if outdated else ()
    delete = _deletable(outdated, own, target, bool(failing))
    if delete:
        return Step(delete=tuple(delete), failing=failing)
    old_routers = [pod for pod in living if target.old_router(pod)]
    if old_routers and (failing or not outdated):
        patch = _patchable(old_routers, own, target)
        return Step(patch=tuple(patch), waits_for="" if patch else _waits_for(own, target), failing=failing)
    return Step(waits_for=_waits_for(own, target) if outdated else "", failing=failing)


def _deletable(outdated: Sequence[Pod], own: Sequence[Pod], target: Target, stopped: bool) -> list[Pod]:
    """Broken ones all at once; of the others the least valuable, those first that are not ready now."""
    broken = [pod for pod in outdated if pod.broken]
    if stopped or len(broken) == len(outdated):
        return broken
    down = sorted((pod for pod in outdated if not pod.broken and not pod.ready), key=_value)
    up = sorted((pod for pod in outdated if pod.ready), key=_value)
    return [*broken, *down[: _replaceable(own, target)], *up[: _spare(own, target)]]


def _patchable(old_routers: Sequence[Pod], own: Sequence[Pod], target: Target) -> list[Pod]:
    down = [pod for pod in old_routers if not pod.ready]
    up = sorted((pod for pod in old_routers if pod.ready and not pod.router_in_flight), key=_value)
    return [*down, *up[: _spare(own, target)]]


def _value(pod: Pod) -> tuple[int, int, int]:
    return pod.value


def _spare(own: Sequence[Pod], target: Target) -> int:
    """How many ready pods may be taken down now."""
    return max(0, sum(_steady(pod) for pod in own) - (target.replicas - target.max_unavailable))


def _replaceable(own: Sequence[Pod], target: Target) -> int:
    """How many pods that are not ready, but may be again, may be replaced beside those that are being replaced."""
    settled = sum(_steady(pod) or (pod.terminating_s is None and target.outdated(pod)) for pod in own)
    return max(0, target.max_unavailable - (target.replicas - settled))


def _steady(pod: Pod) -> bool:
    return pod.available and not pod.router_in_flight


def _waits_for(own: Sequence[Pod], target: Target) -> str:
    names = sorted(pod.name for pod in own if not _steady(pod))
    missing = target.replicas - len({pod.ordinal for pod in own})
    parts = [listed(names, _SHOWN)] if names else []
    parts += [f"{missing} pods that do not exist yet"] if missing > 0 else []
    return " and ".join(parts) or "pods to be ready"
