"""ChatML as the sim renders it."""

from __future__ import annotations

from typing import Any

import pytest

from prefixpool_agent.sim.template import DEFAULT_SYSTEM, ChatTemplate, TemplateError

USER: dict[str, Any] = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def test_a_default_system_prompt_comes_first() -> None:
    expected = f"<|im_start|>system\n{DEFAULT_SYSTEM}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert ChatTemplate().render([USER]) == expected


def test_an_own_system_prompt_replaces_it() -> None:
    text = ChatTemplate().render([{"role": "system", "content": "Be brief"}, USER], add_generation_prompt=False)
    assert text == "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"


def test_text_parts_are_joined_by_newlines() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ChatTemplate().render([{"role": "user", "content": parts}]) == ChatTemplate().render(
        [{"role": "user", "content": "a\nb"}]
    )


def test_appending_a_message_only_appends_text() -> None:
    first = ChatTemplate().render([USER], [TOOL], add_generation_prompt=False)
    longer = ChatTemplate().render([USER, {"role": "assistant", "content": "Ho"}, USER], [TOOL])
    assert longer.startswith(first)


def test_tools_matter_unless_they_are_ignored() -> None:
    assert '"name": "f"' in ChatTemplate().render([USER], [TOOL])
    ignoring = ChatTemplate(renders_tools=False)
    assert ignoring.render([USER], [TOOL]) == ignoring.render([USER])
    assert ignoring.facts().renders_tools is False
    assert ignoring.facts().digest != ChatTemplate().facts().digest


def test_tool_calls_are_rendered_from_text_or_object_arguments_alike() -> None:
    def call(arguments: Any) -> str:
        return ChatTemplate().render(
            [
                USER,
                {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]},
            ]
        )

    assert call('{"x": 1}') == call({"x": 1})
    assert '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>' in call({"x": 1})


def test_continuing_the_last_message_leaves_it_open() -> None:
    text = ChatTemplate().render([USER, {"role": "assistant", "content": "Ho"}], continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nHo")


@pytest.mark.parametrize(
    "message",
    [
        {"content": "x"},
        {"role": "user", "content": 5},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
        {"role": "assistant", "tool_calls": ["f"]},
        {"role": "assistant", "tool_calls": 5},  # was answered with 500
    ],
)
def test_what_cannot_be_rendered(message: dict[str, Any]) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate().render([message])
