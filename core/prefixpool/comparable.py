"""Whether an answer's count of cached tokens says something about the prefix of its request (design: 4.6). Pure.

One rule for agents and routers: one that knew less would call replicas drifted for what the other leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def comparable(body: Mapping[str, Any]) -> bool:
    """False where vLLM sums over several sequences, skips the cache on purpose, or may read only a part of the text."""
    several = any(_more_than_one(body.get(name)) for name in ("n", "best_of"))
    return not (several or _several_prompts(body.get("prompt")) or _reads_all(body) or _truncates(body))


def _more_than_one(value: Any) -> bool:
    return isinstance(value, int) and value > 1


def _several_prompts(prompt: Any) -> bool:
    """A list of one prompt is that prompt, for its chain as well (`chain.canonical`)."""
    return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)


def _reads_all(body: Mapping[str, Any]) -> bool:
    """Log-probabilities of the prompt need its logits: the engine computes all of it, whatever is cached."""
    echoes = bool(body.get("echo")) and body.get("logprobs") is not None
    return echoes or body.get("prompt_logprobs") is not None or body.get("skip_reading_prefix_cache") is True


def _truncates(body: Mapping[str, Any]) -> bool:
    """Perhaps not all of the text is read; which part only the engine knows."""
    return body.get("truncate_prompt_tokens") is not None or body.get("truncation") not in (None, "disabled")
