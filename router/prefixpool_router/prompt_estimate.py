"""How many tokens a prompt has, without a tokenizer: bytes per token as learned from `usage`, per model."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

DEFAULT_BYTES_PER_TOKEN: Final = 4.0  # English text; learned after the first answer
_MEMORY_BYTES: Final = 200_000.0  # canonical bytes of prompts that the running ratio remembers
_MAX_MODELS: Final = 64  # names come from clients
_SANE: Final = (0.25, 64.0)  # bytes per token; token ids as prompts are 4, images can be far below 1


class TokenEstimate:
    """Learns per model; not thread-safe."""

    def __init__(self) -> None:
        self._ratio: OrderedDict[str, tuple[float, float]] = OrderedDict()  # model -> (bytes, tokens) of recent prompts

    def bytes_per_token(self, model: str) -> float:
        """Of canonical text, template overhead included."""
        found = self._ratio.get(model)
        return found[0] / found[1] if found else DEFAULT_BYTES_PER_TOKEN

    def tokens(self, model: str, canonical_bytes: int) -> int:
        """At least 1."""
        return max(1, round(canonical_bytes / self.bytes_per_token(model)))

    def learn(self, model: str, canonical_bytes: int, prompt_tokens: int) -> None:
        """From one answer. Ratios that no text has (a prompt of images) are ignored."""
        if canonical_bytes <= 0 or prompt_tokens <= 0 or not _SANE[0] <= canonical_bytes / prompt_tokens <= _SANE[1]:
            return
        known_bytes, known_tokens = self._ratio.pop(model, (0.0, 0.0))
        total = known_bytes + canonical_bytes
        keep = min(1.0, _MEMORY_BYTES / total)
        self._ratio[model] = (total * keep, (known_tokens + prompt_tokens) * keep)
        if len(self._ratio) > _MAX_MODELS:
            self._ratio.popitem(last=False)
