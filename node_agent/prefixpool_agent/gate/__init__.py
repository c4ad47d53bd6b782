"""The gate: a pure ASGI middleware inside the engine's API server, first line of defence and source of notes.

It checks the pool's key, knows the allowed paths, enforces fence and in-flight bound, labels requests, and tells the agent
what arrives and how it ends. Imports core and the standard library only; configured by the environment (core `names`).
"""

from prefixpool_agent.gate.app import Gate

__all__ = ["Gate"]
