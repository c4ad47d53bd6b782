"""What one request of the demo showed, as the client saw it. Pure data."""

from __future__ import annotations

from typing import Any

import msgspec


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Times are seconds of one monotonic clock. `error` is empty for a request that was answered in full."""

    step: int
    session: int
    turn: int
    kind: str
    started_s: float
    first_s: float = 0.0  # first chunk with text; 0 = none came
    ended_s: float = 0.0
    error: str = ""
    request_id: str = ""
    replica: str = ""
    reason: str = ""
    predicted_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish: str = ""
    reply: str = ""
    messages: tuple[dict[str, Any], ...] = ()

    @property
    def ttft_s(self) -> float:
        """Time to first token; 0 if none came."""
        return self.first_s - self.started_s if self.first_s else 0.0


class Tokens(msgspec.Struct, frozen=True):
    """The tokens of one request: those it sent, and those whose keys and values the engine computed in the end."""

    prompt: tuple[int, ...]
    stored: tuple[int, ...]


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """All samples of one arm. `precise`: the router knew residency from agents."""

    name: str
    policy: str
    precise: bool
    started_s: float
    ended_s: float
    samples: tuple[Sample, ...]

    def answered(self) -> list[Sample]:
        """In the order of completion."""
        return sorted((s for s in self.samples if not s.error), key=lambda s: s.ended_s)
