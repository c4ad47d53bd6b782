"""Which paths of the engine are open to holders of the key, and how the gate treats each."""

from __future__ import annotations

from enum import Enum
from typing import Final


class Kind(Enum):
    """What a request is to the gate."""

    CHAIN = "chain"  # engine work on a prompt: fenced, bounded, labelled, noted with its body
    PLAIN = "plain"  # other engine work: the same, but noted without body, which passes unread (audio files)
    LIGHT = "light"  # no engine work: passes untouched, also while fenced (the agent asks some of them itself)
    RESET = "reset"  # clears the prefix cache: passes, and the agent is told


_CHAIN: Final = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
_PLAIN: Final = frozenset(
    {
        "/inference/v1/generate",
        "/v1/chat/completions/batch",
        "/v1/embeddings",
        "/v2/embed",
        "/pooling",
        "/classify",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
    }
)
_LIGHT: Final = frozenset(
    {
        "/health",
        "/ping",
        "/version",
        "/load",
        "/metrics",
        "/kv_event_sources",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
        "/v1/messages/count_tokens",
        "/v1/chat/completions/render",
        "/v1/completions/render",
        "/v1/responses/render",
        "/v1/messages/render",
    }
)
_STORED_RESPONSES: Final = "/v1/responses/"


def classify(method: str, path: str) -> Kind | None:
    """None: not an open path. Another method than POST on a path of engine work is light: the engine answers 405."""
    if path in _CHAIN:
        return Kind.CHAIN if method == "POST" else Kind.LIGHT
    if path in _LIGHT or path.startswith(_STORED_RESPONSES):
        return Kind.LIGHT
    if path in _PLAIN:
        return Kind.PLAIN if method == "POST" else Kind.LIGHT
    if path == "/reset_prefix_cache":
        return Kind.RESET
    return None
