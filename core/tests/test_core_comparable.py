"""Which answers' counts of cached tokens say something about the prefix of their requests."""

from __future__ import annotations

import pytest

from prefixpool.chain import canonical
from prefixpool.comparable import comparable


@pytest.mark.parametrize(
    ("body", "counts"),
    [
        ({"messages": []}, True),
        ({"n": 1}, True),
        ({"n": 2}, False),
        ({"prompt_logprobs": 0}, False),
        ({"prompt": "text"}, True),
        ({"prompt": "text", "echo": True, "logprobs": 1}, False),  # as evaluations ask: all is computed
        ({"prompt": "text", "echo": True}, True),
        ({"prompt": "text", "logprobs": 1}, True),
        ({"prompt": "text", "skip_reading_prefix_cache": True}, False),
        ({"prompt": "text", "truncate_prompt_tokens": 100}, False),
        ({"input": "text", "truncation": "auto"}, False),
        ({"input": "text", "truncation": "disabled"}, True),
        ({"prompt": [1, 2, 3]}, True),
        ({"prompt": ["a", "b"]}, False),
        ({"prompt": [[1, 2], [3]]}, False),
        ({"prompt": [], "messages": []}, True),
        ({"prompt": "x", "best_of": 3}, False),
    ],
)
def test_which_answers_count(body: dict[str, object], counts: bool) -> None:
    assert comparable(body) is counts


@pytest.mark.parametrize("prompt", ["text", [1, 2, 3]])
def test_routers_learned_nothing_from_lists_of_one_prompt_which_agents_compared(prompt: object) -> None:
    """As some clients send every prompt. Its chain is that of the prompt alone."""
    assert comparable({"prompt": [prompt]})
    of_list, alone = (canonical("/v1/completions", {"prompt": each}) for each in ([prompt], prompt))
    assert of_list == alone is not None
