"""When a request's prefill ended, seen from its KV events: answers that are not streamed do not show it otherwise. Pure.

The batch with a prompt's last full block comes with the step that samples the first token, within some milliseconds
(research: residency.md).
"""

from __future__ import annotations

from typing import Final

MAX_STEPS: Final = 256  # prefill chunks of one request that are remembered


class Progress:
    """One running request."""

    __slots__ = ("_steps", "at_s", "body_bytes", "full")

    def __init__(self, at_s: float, body_bytes: int, full: bool) -> None:
        """`full`: the engine re-announces blocks that it reuses, so that its events say nothing of the prefill."""
        self.at_s = at_s
        self.body_bytes = body_bytes
        self.full = full
        self._steps: list[tuple[float, int]] = []

    def stored(self, at_s: float, tokens: int) -> None:
        """A batch stored so many new tokens of the request."""
        if len(self._steps) < MAX_STEPS:
            self._steps.append((at_s, tokens))

    def prefill_end_s(self, prompt: int, cached: int, block_tokens: int) -> float:
        """Same clock as `stored`; 0 if it cannot be told, as for prompts with less than one new block."""
        wanted = prompt // block_tokens * block_tokens - cached if block_tokens else 0
        if self.full or wanted <= 0:
            return 0.0
        for at_s, tokens in self._steps:
            wanted -= tokens
            if wanted <= 0:
                return max(at_s, self.at_s)
        return 0.0
