"""Deterministic stand-ins for log-probabilities, in both shapes of OpenAI's API. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefixpool_agent.sim.tokenizer import token_bytes


def logprob(token: int) -> float:
    """Between -1 and 0, a function of the token alone."""
    return -(token * 2654435761 % 997) / 997


def _entry(token: int) -> dict[str, Any]:
    data = token_bytes(token)
    return {"token": data.decode("utf-8", "replace"), "logprob": logprob(token), "bytes": list(data)}


def chat_logprobs(tokens: Sequence[int], top: int) -> dict[str, Any]:
    """Of chat completions. The alternatives among the `top` ones are made up."""
    return {"content": [{**_entry(token), "top_logprobs": _alternatives(token, top)} for token in tokens]}


def _alternatives(token: int, top: int) -> list[dict[str, Any]]:
    best = _entry(token)
    others = [
        {"token": f"{best['token']}{i}", "logprob": best["logprob"] - i, "bytes": best["bytes"]} for i in range(1, top)
    ]
    return [best, *others][:top]


def completion_logprobs(tokens: Sequence[int], top: int, offset: int = 0) -> dict[str, Any]:
    """Of text completions. `offset`: characters before the first token."""
    entries = [_entry(token) for token in tokens]
    offsets = [offset]
    for entry in entries:
        offsets.append(offsets[-1] + len(entry["token"]))
    return {
        "text_offset": offsets[:-1],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "tokens": [entry["token"] for entry in entries],
        "top_logprobs": [{entry["token"]: entry["logprob"]} if top else None for entry in entries],
    }
