"""Middleware of bench/gate.py: the real gate, or nothing at all for requests that ask for it. Never used elsewhere."""

from __future__ import annotations

from typing import Any

from prefixpool_agent.gate import Gate


class Switch:
    """One engine serves both arms, so that they differ in the gate only."""

    def __init__(self, app: Any) -> None:
        self._bare = app
        self._gated = Gate(app)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        bare = scope["type"] == "http" and any(name == b"x-bench-bare" for name, _ in scope["headers"])
        await (self._bare if bare else self._gated)(scope, receive, send)
