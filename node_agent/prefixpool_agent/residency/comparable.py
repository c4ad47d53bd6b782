"""Whether an answer's count of cached tokens says something about the prefix of its request (design: 4.6). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def comparable(body: Mapping[str, Any]) -> bool:
    """False where vLLM sums over several sequences or skips the cache on purpose."""
    several = any(_more_than_one(body.get(name)) for name in ("n", "best_of"))
    # Log-probabilities of the prompt need its logits, so the engine reads nothing from the cache.
    skips = body.get("prompt_logprobs") is not None or body.get("skip_reading_prefix_cache") is True
    echoes = bool(body.get("echo")) and body.get("logprobs") is not None
    # Perhaps not all of the text is read; which part only the engine knows.
    truncates = body.get("truncate_prompt_tokens") is not None or body.get("truncation") not in (None, "disabled")
    return not (several or skips or echoes or truncates or _several_prompts(body.get("prompt")))


def _more_than_one(value: Any) -> bool:
    return isinstance(value, int) and value > 1


def _several_prompts(prompt: Any) -> bool:
    return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
