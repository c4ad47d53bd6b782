"""How much of what lies below a replica's device a request loads; the rest is computed. Pure (research: algorithms.md 3).

An engine reads a prefix: whatever is computed at some depth, everything behind it is computed, too. So the choice is one
depth, the cut. A token costs the more to compute the deeper it lies, and the same to load wherever in a tier it does; so
within a tier the costs of cuts are concave, and the cheapest cut is where a tier ends: everything is loaded, or nothing from
disk, or nothing at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from prefixpool.policy.cost import Rates

RETRIED: Final = 1 / 32  # of the loads that are too dear are made all the same: else nobody would see a tier heal
NO_DISK: Final[Mapping[str, Any]] = {"kv_load_tiers": [{"medium": "CPU"}]}
NO_LOAD: Final[Mapping[str, Any]] = {"max_load_tokens": 0}


class Depths(NamedTuple):
    """Tokens of a prompt that a replica holds from the first on, in that tier or nearer. They never shrink."""

    device: int = 0
    host: int = 0
    held: int = 0


class Cut(NamedTuple):
    """Up to `cached` tokens nothing is computed."""

    cached: int
    load_s: float  # bringing back what of them is not on the device
    compute_s: float  # prefill of the rest of the prompt


def cheapest(depths: Depths, prompt_tokens: int, rates: Rates) -> Cut:
    """The cut that costs least; of equal ones the deepest, which leaves the engine free for others.

    Asked for up to 33 replicas per decision, hence the sums spelt out: `Rates.prefill_s` and `load_s`.
    """
    device, host, held = depths
    p1, p2, n = rates.p1, rates.p2, prompt_tokens
    cached, load, compute = held, 0.0, (n - held) * (p1 + p2 * (n + held))
    if held > device:
        near = (host - device) * rates.host_s_per_token
        load = near + (held - host) * rates.disk_s_per_token
        if held > host and near + (rest := (n - host) * (p1 + p2 * (n + host))) < load + compute:
            cached, load, compute = host, near, rest
        if host > device and (rest := (n - device) * (p1 + p2 * (n + device))) < load + compute:
            cached, load, compute = device, 0.0, rest
    return Cut(cached, load, compute)


def load_s(depths: Depths, cut: int, rates: Rates) -> float:
    """Bringing back what lies between the device's depth and `cut`."""
    near = min(cut, depths.host)
    return (near - depths.device) * rates.host_s_per_token + (cut - near) * rates.disk_s_per_token


def order(depths: Depths, cut: int) -> Mapping[str, Any]:
    """What keeps an engine (vLLM 0.32) from loading beyond `cut`, a depth of one of the tiers: its `kv_transfer_params`.

    Neither names a depth, because the device may hold more or less by the time the engine looks. Empty: load everything.
    """
    if cut >= depths.held:
        return {}
    return NO_DISK if cut > depths.device else NO_LOAD


def retried(draw: float) -> bool:
    """Whether this one is made all the same; by other bits of the query's draw than the choice of a replica uses."""
    return draw * (1 << 20) % 1.0 < RETRIED
