"""How long sequences may be, as the engine reads it from a config.json (vLLM 0.32, `config/model.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

_UNSAID: Final = 2048
_MOST: Final = 1 << 31  # no engine takes more; without an end, an odd factor makes a status that the API server refuses
# With these `max_position_embeddings` is the whole length already; with others it is multiplied by `factor`.
_SCALED: Final = frozenset(
    ("default", "mrope", "su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling")
)
_TWO_LENGTHS: Final = frozenset(("su", "longrope"))


def longest(config: Mapping[str, Any]) -> int:
    """Tokens that a sequence may have at most. Expects a config that `config.checked` has passed."""
    most = min(int(config.get("max_position_embeddings") or config.get("n_positions") or _UNSAID), _MOST)
    if "gemma3" in str(config.get("model_type")):
        return most
    factors = [rope["factor"] for rope in _ropes(config) if _kind(rope) not in _SCALED and _is_number(rope.get("factor"))]
    return int(min(max(most, most * factors[-1]), _MOST)) if factors else most


def unasked(config: Mapping[str, Any]) -> int:
    """Tokens that the engine takes if nobody asks for more: of LongRoPE's two lengths the shorter one."""
    shorter = config.get("original_max_position_embeddings")
    if shorter and any(_kind(rope) in _TWO_LENGTHS for rope in _ropes(config)):
        return min(int(shorter), longest(config))
    return longest(config)


def _ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """One, or one for each kind of layer."""
    found: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    inner = [value for value in found.values() if isinstance(value, Mapping)]
    yield from inner or ([found] if found else [])


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
