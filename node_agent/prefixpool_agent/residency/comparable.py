"""Whether an answer's count of cached tokens says something about the prefix of its request (design: 4.6). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefixpool import comparable as core


def comparable(body: Mapping[str, Any]) -> bool:
    """False also where vLLM sums over several prompts."""
    return core.comparable(body) and not _several_prompts(body.get("prompt"))


def _several_prompts(prompt: Any) -> bool:
    return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
