"""A prefix that is promised to a tenant until a time: what an engine is told to keep it in host memory. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefixpool_router.dispatch_types import RoutedRequest


def reservation(request: RoutedRequest, prompt_tokens: int, now_s: float) -> Mapping[str, Any]:
    """`kv_transfer_params` (prefixpool_agent.tiers.reservations.Wish); empty: none. `now_s`: seconds since 1970.

    The engine keeps it only as far as the tenant's share of host memory goes; each request for the same text renews it.
    A body that was not read names no text, and nothing can be added to it.
    """
    if not request.reserve_s or request.steers_loading or request.body is None:
        return {}
    return {"tenant": request.tenant, "pin_until": now_s + request.reserve_s, "pin_tokens": prompt_tokens}
