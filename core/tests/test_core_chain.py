"""The prefix chain: what must never change, and what must always change it."""

import copy
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixpool.chain import PrefixChain, canonical, prefix_chain
from prefixpool.chain.boundary import CHUNK, CONTENT_END
from prefixpool.wire import Template

CHAT = "/v1/chat/completions"
roles = st.sampled_from(["user", "assistant", "tool"])
texts = st.text(max_size=400)
messages = st.lists(st.fixed_dictionaries({"role": roles, "content": texts}), min_size=1, max_size=8)


def chain(body: dict[str, Any], path: str = CHAT, **how: Any) -> PrefixChain:
    request = canonical(path, body, **how)
    assert request is not None
    return prefix_chain(request)


def chat(*turns: tuple[str, Any], **extra: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": role, "content": content} for role, content in turns], **extra}


@given(messages, st.fixed_dictionaries({"role": roles, "content": texts}))
def test_appending_a_message_never_changes_earlier_boundaries(history: list[dict[str, str]], new: dict[str, str]) -> None:
    before = chain({"model": "m", "messages": history, "add_generation_prompt": False})
    after = chain({"model": "m", "messages": [*history, new], "add_generation_prompt": False})
    kept = dict(zip(after.offsets, after.hashes, strict=True))
    assert all(kept[offset] == key for offset, key in zip(before.offsets, before.hashes, strict=True))


@given(messages)
def test_generation_mark_is_where_the_assistants_next_turn_begins(history: list[dict[str, str]]) -> None:
    now = chain({"model": "m", "messages": history})
    later = chain({"model": "m", "messages": [*history, {"role": "assistant", "content": "reply"}]})
    assert now.hashes[-1] in later.hashes


@given(messages)
def test_string_and_parts_content_agree(history: list[dict[str, str]]) -> None:
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in history]
    assert chain({"model": "m", "messages": history}) == chain({"model": "m", "messages": parts})


@given(st.text(min_size=1, max_size=3000))
def test_offsets_ascend_and_end_at_the_prompt(text: str) -> None:
    found = chain(chat(("user", text)))
    assert list(found.offsets) == sorted(set(found.offsets))
    assert found.offsets[-1] == found.total_bytes
    assert 0 <= found.cold < len(found.hashes)


def test_two_marks_for_each_message_and_one_for_the_generation_prompt() -> None:
    found = chain(chat(("system", "be brief"), ("user", "hello"), ("assistant", "hi"), ("user", "again")))
    kinds = [mark for mark in found.marks if mark != CHUNK]
    assert kinds == [0, CONTENT_END, 1, CONTENT_END, 2, CONTENT_END, 3, CONTENT_END, 4]


TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
OTHER_TOOLS = [{"type": "function", "function": {"name": "stocks", "parameters": {"type": "object"}}}]
BASE = chat(("system", "You are helpful."), ("user", "What is up?"), tools=TOOLS)


@pytest.mark.parametrize(
    ("change", "how"),
    [
        ({"model": "other"}, {}),
        ({"model": "m-adapter"}, {}),
        ({"tools": OTHER_TOOLS}, {}),
        ({"tools": []}, {}),
        ({"chat_template": "{{ messages }}"}, {}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {}),
        ({"truncate_prompt_tokens": 100}, {}),  # the engine reads the end of the same text
        ({}, {"salt": "tenant"}),
        ({}, {"template": Template(digest="x")}),
    ],
)
def test_whatever_changes_the_render_changes_the_chain(change: dict[str, Any], how: dict[str, Any]) -> None:
    same = chain(BASE)
    other = chain({**BASE, **change}, **how)
    assert same.hashes[-1] != other.hashes[-1]
    if "tools" not in change:  # tools stand behind the system text, everything else before the first byte
        assert not set(same.hashes) & set(other.hashes)


def test_other_system_text_shares_only_the_role_marker() -> None:
    one, two = chain(BASE), chain({**BASE, "messages": [{"role": "system", "content": "No."}, BASE["messages"][1]]})
    assert set(one.hashes) & set(two.hashes) == {one.hashes[0]}


def test_same_tools_with_other_user_text_share_the_prefix_up_to_the_users_words() -> None:
    other = copy.deepcopy(BASE)
    other["messages"][1]["content"] = "Something else"
    shared = set(chain(BASE).hashes) & set(chain(other).hashes)
    marks = chain(BASE)
    assert shared >= {key for key, mark in zip(marks.hashes, marks.marks, strict=True) if mark in (0, 1, 2)}


def test_template_that_ignores_tools_gives_one_chain_for_both() -> None:
    plain = {key: value for key, value in BASE.items() if key != "tools"}
    deaf = Template(renders_tools=False)
    assert chain(BASE, template=deaf) == chain(plain, template=deaf)


def test_day_counts_only_for_templates_that_print_it() -> None:
    dated = Template(prints_date=True)
    assert chain(BASE, day="2026-01-01") == chain(BASE, day="2026-01-02")
    assert chain(BASE, template=dated, day="2026-01-01") != chain(BASE, template=dated, day="2026-01-02")


def test_text_is_normalised_as_the_tokenizer_would() -> None:
    composed, decomposed = chat(("user", "caf\u00e9")), chat(("user", "cafe\u0301"))
    assert chain(composed) != chain(decomposed)
    assert chain(composed, template=Template(nfc=True)) == chain(decomposed, template=Template(nfc=True))


def test_salts_cannot_imitate_model_names() -> None:
    assert chain({**BASE, "model": "ab"}, salt="c") != chain({**BASE, "model": "a"}, salt="bc")


def test_one_conversation_has_one_chain_in_all_chat_apis() -> None:
    as_chat = chat(("system", "Be kind."), ("user", "Hello"), ("assistant", "Hi"), ("user", "Bye"))
    as_messages = {
        "model": "m",
        "system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "user", "content": [{"type": "text", "text": "Bye"}]},
        ],
    }
    as_responses = {
        "model": "m",
        "instructions": "Be kind.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi"}]},
            {"type": "message", "role": "user", "content": "Bye"},
        ],
    }
    assert chain(as_chat) == chain(as_messages, "/v1/messages") == chain(as_responses, "/v1/responses")


def test_tool_results_of_anthropic_messages_are_tool_messages() -> None:
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}}
    as_chat = {
        "model": "m",
        "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "t1", "content": "rain"},
        ],
    }
    as_messages = {
        "model": "m",
        "messages": [
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "rain"}]},
        ],
    }
    assert chain(as_chat) == chain(as_messages, "/v1/messages")


def test_a_request_without_any_role_and_text_has_a_segment_like_any_other() -> None:
    """The agent ended over one that had none, and over its note again each time it came back."""
    for content in ([], "", None):
        request = canonical(CHAT, chat(("", content)))
        assert request is not None
        assert len(request.segments) == 1


def test_many_short_thoughts_cost_time_as_the_square_of_their_number() -> None:
    """Each was appended to all before it: eight seconds of the router for 10 MB."""
    blocks = [{"type": "thinking", "thinking": "x" * 50}] * 100_000
    started = time.process_time()
    found = canonical("/v1/messages", {"model": "m", "messages": [{"role": "assistant", "content": blocks}]})
    assert found is not None
    assert len(found.segments[0].data) == 5_000_000
    assert time.process_time() - started < 1.0


def test_prompts_that_differ_in_how_much_is_reasoned_were_taken_for_one_in_two_of_three_apis() -> None:
    """Templates print it, some at the very beginning: neither finds anything of the other in a cache."""

    def told(effort: str) -> list[PrefixChain]:
        messages = [{"role": "user", "content": "Hello"}]
        return [
            chain({"model": "m", "messages": messages, "reasoning_effort": effort}),
            chain({"model": "m", "messages": messages, "output_config": {"effort": effort}}, "/v1/messages"),
            chain({"model": "m", "input": "Hello", "reasoning": {"effort": effort, "summary": None}}, "/v1/responses"),
        ]

    low, high = told("low"), told("high")
    assert low[0] == low[1] == low[2]
    assert high[0] == high[1] == high[2]
    assert not set(low[0].hashes) & set(high[0].hashes)
    plain = chain({"model": "m", "input": "Hello"}, "/v1/responses")
    assert chain({"model": "m", "input": "Hello", "reasoning": {"summary": "auto"}}, "/v1/responses") == plain


def test_prompts_with_thinking_switched_off_were_taken_for_those_with_it() -> None:
    def told(**fields: Any) -> PrefixChain:
        return chain({"model": "m", "messages": [{"role": "user", "content": "Hello"}], **fields}, "/v1/messages")

    assert not set(told(thinking={"type": "disabled"}).hashes) & set(told().hashes)
    assert told(thinking={"type": "enabled", "budget_tokens": 1024}) == told(thinking={"type": "adaptive"}) == told()


REMINDED = {
    "model": "m",
    "system": [{"type": "text", "text": "Be kind."}],
    "messages": [
        {"role": "user", "content": "Hello"},
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "system", "content": "x-anthropic-billing-header: 1"},
        {"role": "user", "content": "Bye"},
    ],
}


def test_system_text_between_turns_stays_where_the_template_takes_it() -> None:
    as_chat = chat(("system", "Be kind."), ("user", "Hello"), ("system", "Be brief."), ("user", "Bye"))
    assert chain(REMINDED, "/v1/messages") == chain(as_chat)


def test_turns_behind_new_system_text_were_believed_to_be_cached_though_it_had_moved_before_them() -> None:
    """Where a template wants system text first, vLLM puts that of all turns there; Claude Code adds some as it goes."""
    first = Template(system_first=True)
    as_chat = chat(("system", "Be kind.Be brief."), ("user", "Hello"), ("user", "Bye"))
    assert chain(REMINDED, "/v1/messages", template=first) == chain(as_chat, template=first)
    bare = {key: value for key, value in REMINDED.items() if key != "system"}
    as_chat = chat(("system", "Be brief."), ("user", "Hello"), ("user", "Bye"))
    assert chain(bare, "/v1/messages", template=first) == chain(as_chat, template=first)


def test_turns_behind_a_tool_that_was_taken_away_were_believed_to_be_cached() -> None:
    """vLLM prints all tools at the beginning, without it."""
    tool = {"name": "weather", "input_schema": {"type": "object"}}
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    removal = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "weather"}}
    before = chain({"model": "m", "tools": [tool], "messages": turns}, "/v1/messages")
    changed = [*turns, {"role": "system", "content": [removal]}]
    after = chain({"model": "m", "tools": [tool], "messages": changed}, "/v1/messages")
    turns_of = {key for key, mark in zip(before.hashes, before.marks, strict=True) if mark > 0}  # segment 0 is the tools
    assert len(turns_of) == 3
    assert not turns_of & set(after.hashes)


@pytest.mark.parametrize(
    "earlier",
    [{"previous_response_id": "resp_1"}, {"previous_response": {"id": "resp_1"}}, {"previous_input_messages": [{}]}],
)
def test_what_continues_a_stored_response_was_taken_for_the_beginning_of_a_conversation(earlier: dict[str, Any]) -> None:
    """Two of them with equal input have nothing in common in a cache: what the model reads first is not in the body."""
    assert canonical("/v1/responses", {"model": "m", "input": "Go on.", **earlier}) is None


def test_counting_tokens_has_no_chain_because_nothing_is_computed() -> None:
    assert canonical("/v1/messages/count_tokens", chat(("user", "Hello"))) is None


def test_images_count_by_content_and_do_not_hide_the_text_before_them() -> None:
    def seen(url: str) -> PrefixChain:
        return chain(chat(("user", [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": url}}])))

    assert seen("data:,a") == seen("data:,a")
    assert seen("data:,a").hashes[-1] != seen("data:,b").hashes[-1]
    assert seen("data:,a").hashes[1] == seen("data:,b").hashes[1]


def test_completions_take_text_token_ids_and_lists_of_one() -> None:
    text = chain({"model": "m", "prompt": "abc"}, "/v1/completions")
    assert text == chain({"model": "m", "prompt": ["abc"]}, "/v1/completions")
    assert chain({"model": "m", "prompt": [1, 2, 3]}, "/v1/completions") == chain(
        {"model": "m", "prompt": [[1, 2, 3]]}, "/v1/completions"
    )
    assert canonical("/v1/completions", {"model": "m", "prompt": ["a", "b"]}) is None


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": None},
        {"messages": []},
        {"messages": "hi"},
        {"messages": [1]},
        {"messages": [[]]},
        {"prompt": None},
        {"prompt": [-1]},
        {"prompt": [True, "x"]},
        {"input": 5},
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/messages", "/v1/responses", "/v1/embeddings"])
def test_bodies_without_a_usable_prompt_have_no_chain(path: str, body: dict[str, Any]) -> None:
    assert canonical(path, body) is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
fields = ["role", "content", "tool_calls", "name", "type", "text", "input", "reasoning", "tool_use_id"]
odd_messages = st.lists(st.dictionaries(st.sampled_from(fields), json_values, max_size=5), max_size=4)


@given(odd_messages, json_values, st.sampled_from([CHAT, "/v1/messages", "/v1/responses"]))
def test_odd_input_never_raises(odd: list[dict[str, Any]], anything: Any, path: str) -> None:
    body = {"model": anything, "messages": odd, "input": odd, "tools": anything, "system": anything, "documents": anything}
    request = canonical(path, body)
    if request is not None:
        prefix_chain(request)


def nested(depth: int) -> list[Any]:
    out: list[Any] = []
    for _ in range(depth):
        out = [out]
    return out


@pytest.mark.parametrize("odd", ["\ud800", 1 << 70, nested(5000)])
def test_arguments_that_cannot_be_written_again_ended_a_request_in_500(odd: Any) -> None:
    """Read leniently, or just within the limit of nesting, which is a few calls nearer where they are written."""
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {"x": odd}}
    assert chain({"model": "m", "messages": [{"role": "assistant", "content": [call]}]}, "/v1/messages").hashes
    assert chain(chat(("user", "x"), tools=[odd], chat_template_kwargs={"x": odd})).hashes


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (CHAT, {"role": nested(5000), "content": "x"}),
        (CHAT, {"role": "user", "content": "x", "tool_calls": [{"function": {"name": nested(5000)}}]}),
        (CHAT, {"role": "user", "content": [{"image": [1 << 70, nested(5000)]}]}),
        ("/v1/messages", {"role": "assistant", "content": [{"type": "thinking", "thinking": nested(5000)}]}),
    ],
)
def test_lists_in_lists_where_a_word_belongs_ended_a_request_in_500(path: str, message: dict[str, Any]) -> None:
    """The engine's 400 says what is wrong with them."""
    assert chain({"model": "m", "messages": [message]}, path).hashes


def test_lone_surrogates_do_not_fail() -> None:
    chain(chat(("user", "\ud800")))


def test_cold_key_is_the_first_turn_when_that_is_short_and_two_kilobytes_in_when_it_is_long() -> None:
    short = chain(chat(("system", "S" * 5000), ("user", "hello"), ("assistant", "x"), ("user", "y" * 9000)))
    assert short.hashes[short.cold] == chain(chat(("system", "S" * 5000), ("user", "hello"))).hashes[-2]
    document = "D" * 8000
    one, two = chain(chat(("user", document + "one?"))), chain(chat(("user", document + "two, please")))
    assert one.hashes[one.cold] == two.hashes[two.cold]
    assert one.offsets[one.cold] >= 2048


def test_cold_keys_differ_when_only_the_system_text_is_shared() -> None:
    shared = ("system", "S" * 5000)
    one, two = chain(chat(shared, ("user", "A" * 3000))), chain(chat(shared, ("user", "B" * 3000)))
    assert one.hashes[one.cold] != two.hashes[two.cold]


def test_boundaries_of_a_long_prompt_are_few() -> None:
    assert len(chain(chat(("user", "x" * (512 << 10)))).hashes) < 600


def test_committed_vectors(pytestconfig: pytest.Config) -> None:
    """Router, agent and replay of different versions must agree: these hashes may only change with SCHEME."""
    vectors = msgspec.json.decode((pytestconfig.rootpath / "core/tests/chain_vectors.json").read_bytes())
    assert len(vectors) >= 8
    for vector in vectors:
        template = msgspec.convert(vector.get("template", {}), Template)
        found = chain(
            vector["body"], vector["path"], salt=vector.get("salt", ""), day=vector.get("day", ""), template=template
        )
        assert [f"{key:016x}" for key in found.hashes] == vector["hashes"]
        assert list(found.offsets) == vector["offsets"]
        assert found.cold == vector["cold"]
