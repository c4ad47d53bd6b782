"""What one replica is expected to have cached of one request, tier by tier, and how much of it its engine may load. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from prefixpool.policy.cost import Rates
from prefixpool.policy.loading import Cut, Depths, cheapest, load_s, order, retried
from prefixpool.wire import Tier


class Forecast(NamedTuple):
    """Fixed when a request is sent. Tokens and seconds."""

    depths: Depths  # held by the replica
    cut: Cut  # what of that is used
    cached: int  # cached tokens to expect: up to the cut, in whole blocks
    recompute_s: float  # computing all that is held below the device, instead of loading it
    told: Mapping[str, Any]  # the engine's `kv_transfer_params`; empty: nothing

    @property
    def whole(self) -> bool:
        """All that is held is used."""
        return self.cut.cached >= self.depths.held

    def by_tier(self) -> dict[Tier, int]:
        """Cached tokens to expect from each."""
        device, near = min(self.depths.device, self.cached), min(self.depths.host, self.cached)
        return {Tier.DEVICE: device, Tier.HOST: near - device, Tier.DISK: self.cached - near}

    def refused(self) -> list[Tier]:
        """Tiers that hold something which computing is cheaper than loading."""
        if self.whole:
            return []
        device, host, held = self.depths
        return [Tier.HOST] * (host > max(device, self.cut.cached)) + [Tier.DISK] * (held > host)


def forecast(
    depths: Depths, prompt_tokens: int, rates: Rates, *, block_tokens: int, draw: float, steered: bool = False
) -> Forecast:
    """`draw`: the query's. `steered`: the client itself says what is loaded, so the router does not."""
    cut = cheapest(depths, prompt_tokens, rates)
    if cut.cached < depths.held and (steered or retried(draw)):
        everything = load_s(depths, depths.held, rates)
        cut = Cut(depths.held, everything, rates.prefill_s(prompt_tokens - depths.held, depths.held))
    recompute_s = rates.prefill_s(depths.held - depths.device, depths.device)
    return Forecast(depths, cut, cut.cached - cut.cached % block_tokens, recompute_s, order(depths, cut.cached))
