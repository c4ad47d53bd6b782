"""Tests of the HTTP edge run on both event loops: their transports differ in details that matter to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

BOTH = tuple(f"test_router_edge_{name}" for name in ("access", "proxy", "retries", "aborts", "clients", "life", "upstream"))


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.path.stem in BOTH:
        return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}
