"""Boundaries against tokens: what is credited must be shared by every request with the same text so far."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixpool.chain import Canonical, PrefixChain, Segment, SegmentKind, canonical, prefix_chain
from prefixpool.wire import Template
from prefixpool_agent.residency import load_table
from prefixpool_agent.residency.align import UNKNOWN, Alignment, Prompt, Resume, align
from prefixpool_testing.residency_rig import chatml
from prefixpool_testing.tiny_bpe import TinyBpe

MODEL = Path(__file__).parent / "data" / "tiny_model"
BPE = TinyBpe(MODEL / "tokenizer.json")
TABLE = load_table(MODEL)
SYSTEM = "You route requests to engines. Grüße 你好, the prefix of blocks;\n\n    if x == 42: return tokens\n" * 4
QUESTION = "What does the router publish, and to whom? Explain boundaries; residency, tokens.\n" * 3
TOOL = {"type": "function", "function": {"name": "get_the_weather", "description": 'of a "city", for\ntoday é'}}


def chat(*contents: str, **more: Any) -> dict[str, Any]:
    roles = ["system", *["user", "assistant"] * len(contents)]
    return {"model": "m", "messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)], **more}


def request_of(body: dict[str, Any]) -> tuple[Canonical, PrefixChain]:
    request = canonical("/v1/chat/completions", body, template=Template())
    assert request is not None
    return request, prefix_chain(request)


def whole(ids: list[int], body: dict[str, Any]) -> tuple[PrefixChain, Alignment]:
    request, chain = request_of(body)
    return chain, align(Prompt(ids, len(ids), True), TABLE, request, chain)


def predicted(old: dict[str, Any], old_ids: list[int], new: dict[str, Any]) -> int:
    chain, alignment = whole(old_ids, old)
    known = dict(zip(chain.hashes, alignment.depths, strict=True))
    return max((known[h] for h in request_of(new)[1].hashes if h in known), default=0)


def shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_shared_system_text_is_exact() -> None:
    old, new = chat(SYSTEM, QUESTION), chat(SYSTEM, "#other")
    ids, new_ids = BPE.encode(chatml(old["messages"])), BPE.encode(chatml(new["messages"]))
    assert predicted(old, ids, new) == shared(ids, new_ids)


def test_next_turn_is_exact() -> None:
    old, new = chat(SYSTEM, QUESTION), chat(SYSTEM, QUESTION, "An answer.", "More?")
    ids = BPE.encode(chatml(old["messages"]))
    assert predicted(old, ids, new) == len(ids)


def test_cut_anywhere_inside_a_message_is_over_by_a_token_at_most() -> None:
    old = chat(SYSTEM, QUESTION)
    ids = BPE.encode(chatml(old["messages"]))
    for cut in range(len(SYSTEM)):
        new = chat(SYSTEM[:cut] + "#", "x")
        true = shared(ids, BPE.encode(chatml(new["messages"])))
        assert true - 70 <= predicted(old, ids, new) <= true + 1  # a chunk is 64 bytes, at worst as many tokens


def test_text_that_goes_on_otherwise_just_behind_a_boundary_changes_no_credited_token() -> None:
    """What merges across the cut is not credited: one token is backed off."""
    text = (SYSTEM + QUESTION) * 4
    old = chat(text, "x")
    ids = BPE.encode(chatml(old["messages"]))
    chain, alignment = whole(ids, old)
    start, over, cuts = chain.offsets[0], 0, 0
    for offset, mark, depth in zip(chain.offsets, chain.marks, alignment.depths, strict=True):
        prefix = text.encode()[: offset - start]
        if mark != -1 or len(prefix) != offset - start or prefix[-1] > 127:
            continue
        for tail in ("#", "e", "s and", " the", "\n\n", "ing", "1"):
            new_ids = BPE.encode(chatml(chat(prefix.decode() + tail)["messages"]))
            true = shared(ids, new_ids)
            assert depth <= true + 1
            over, cuts = over + (depth > true), cuts + 1
    assert cuts > 100
    assert over / cuts < 0.02


@given(st.text(max_size=300), st.text(max_size=300), st.text(max_size=80))
@settings(max_examples=150, deadline=None)
def test_any_text_is_over_by_two_tokens_at_most(first: str, second: str, other: str) -> None:
    old, new = chat(first, second), chat(first, other)
    try:
        ids, new_ids = (BPE.encode(chatml(body["messages"])) for body in (old, new))
    except UnicodeEncodeError:
        return  # lone surrogates: no tokenizer takes them
    assert predicted(old, ids, new) <= shared(ids, new_ids) + 2


@pytest.mark.parametrize("content", ["t", "user", "s", "im", "assistant"])
def test_a_short_content_is_not_taken_for_a_part_of_the_role_s_header(content: str) -> None:
    """Else the depth behind the header depended on which request came first."""
    short, long = chat(SYSTEM, content, "yes"), chat(SYSTEM, QUESTION)
    depth: dict[int, int] = {}
    for body in (short, long):
        chain, alignment = whole(BPE.encode(chatml(body["messages"])), body)
        depth[len(depth)] = alignment.depths[list(chain.marks).index(1)]
    assert depth[0] == depth[1]


@given(st.lists(st.text(max_size=100), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_depths_never_shrink_with_the_prefix(contents: list[str]) -> None:
    """Else a boundary inside a role's marker outlives the end of the content before it, and routers see a hole."""
    body = chat("", *contents)
    try:
        ids = BPE.encode(chatml(body["messages"]))
    except UnicodeEncodeError:
        return
    depths = whole(ids, body)[1].depths
    assert list(depths) == sorted(depths)


def test_part_of_a_path_tells_only_what_lies_on_it() -> None:
    """A long prompt is computed in steps; the first step's blocks must not pull deeper boundaries up."""
    body = chat(SYSTEM, QUESTION)
    ids = BPE.encode(chatml(body["messages"]))
    request, chain = request_of(body)
    final = align(Prompt(ids, len(ids), True), TABLE, request, chain).depths
    for known in range(8, len(ids), 8):
        part = align(Prompt(ids[:known], None, False), TABLE, request, chain)
        assert not part.covered or known > len(ids) - 10
        for depth, true in zip(part.depths, final, strict=True):
            assert depth == UNKNOWN or true - 1 <= depth <= true


def test_resuming_behind_a_known_content_gives_the_same_depths() -> None:
    body = chat(SYSTEM, QUESTION, "An answer.", QUESTION[::-1])
    ids = BPE.encode(chatml(body["messages"]))
    request, chain = request_of(body)
    final = align(Prompt(ids, len(ids), True), TABLE, request, chain).depths
    at = next(i for i, mark in enumerate(chain.marks) if mark == 1)  # behind the second role marker; a content ends before
    end = max(i for i in range(at) if chain.marks[i] == -2)
    resumed = align(Prompt(ids, len(ids), True), TABLE, request, chain, Resume(end, 0, final[end])).depths
    assert list(resumed[end + 1 :]) == list(final[end + 1 :])


def test_token_arrays_are_exact() -> None:
    tokens = list(range(300, 380))
    request = canonical("/v1/completions", {"model": "m", "prompt": tokens})
    assert request is not None
    chain = prefix_chain(request)
    depths = align(Prompt(tokens[:72], 80, True), TABLE, request, chain).depths
    assert [(o - chain.offsets[0]) // 4 for o in chain.offsets] == list(depths)
    assert set(align(Prompt([7, *tokens[1:72]], 80, True), TABLE, request, chain).depths) == {UNKNOWN}, "not what was read"


def test_nothing_is_credited_behind_an_image() -> None:
    segments = (
        Segment("user", b"What is this in the picture?"),
        Segment("part", b"0123456789abcdef", SegmentKind.OPAQUE),
        Segment("assistant", b"It is a cat on a mat."),
    )
    request = Canonical(b"seed-of-16-bytes", segments, generation=True, lead=0)
    chain = prefix_chain(request)
    ids = BPE.encode("<|im_start|>user\nWhat is this in the picture?????It is a cat on a mat.")
    depths = align(Prompt(ids, len(ids), True), TABLE, request, chain).depths
    image = next(o for o, m in zip(chain.offsets, chain.marks, strict=True) if m == 1)
    assert all((depth == UNKNOWN) == (offset > image) for offset, depth in zip(chain.offsets, depths, strict=True))


@pytest.mark.parametrize("image", [[BPE.encode("?")[0]] * 64, [10**6] * 64])
def test_text_that_the_engine_prints_behind_its_image_was_credited_whatever_the_image(image: list[int]) -> None:
    """vLLM puts the images of a message ahead of its text, where the template says nothing of their place."""
    question = {"type": "text", "text": "What is this in the picture? Say it in a word or two."}
    parts = [question, {"type": "image_url", "image_url": {"url": "data:one"}}]
    body = {"model": "m", "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": parts}]}
    head = BPE.encode(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n")
    ids = [*head, *image, *BPE.encode(f"\n{question['text']}<|im_end|>\n<|im_start|>assistant\n")]
    _, alignment = whole(ids, body)
    assert len(head) - 20 < max(alignment.depths) <= len(head)


def test_ids_without_text_do_not_break_the_alignment() -> None:
    ids = BPE.encode(chatml(chat(SYSTEM, QUESTION)["messages"]))
    chain, alignment = whole([ids[0], 10**6, *ids[1:]], chat(SYSTEM, QUESTION))
    assert alignment.covered
    assert alignment.depths[-1] == len(ids) + 1
    assert chain.marks[-1] == 2


# -- JSON: tools and calls are printed anew by the template ---------------------------------------------------------


def with_tools(body: dict[str, Any], where: str) -> list[int]:
    """Qwen prints tools behind the system text, Mistral before the last user's message, others before the system text."""
    printed = "# Tools\n" + json.dumps(body["tools"][0], ensure_ascii=False) + "\n"
    system, *rest = body["messages"]
    if where == "behind system":
        system = {**system, "content": system["content"] + "\n" + printed}
    elif where == "before system":
        system = {**system, "content": printed + system["content"]}
    else:
        rest[-1] = {**rest[-1], "content": printed + rest[-1]["content"]}
    return BPE.encode(chatml([system, *rest]))


@pytest.mark.parametrize("where", ["behind system", "before system", "before the last message"])
@pytest.mark.parametrize("same_tools", [True, False])
def test_tools_wherever_the_template_prints_them(where: str, same_tools: bool) -> None:
    other = {"type": "function", "function": {"name": "get_another", "description": "something else entirely"}}
    old = chat(SYSTEM, QUESTION, "An answer, long enough to be found.", "And now?", tools=[TOOL])
    new = chat(
        SYSTEM,
        QUESTION,
        "An answer, long enough to be found.",
        "And now?",
        "Yes.",
        "So?",
        tools=[TOOL if same_tools else other],
    )
    ids, new_ids = with_tools(old, where), with_tools(new, where)
    guess, true = predicted(old, ids, new), shared(ids, new_ids)
    assert guess <= true
    if same_tools:
        assert guess >= true - 30, "the role's header and a little template text"


def test_tools_that_move_are_noticed() -> None:
    body = chat(SYSTEM, QUESTION, "An answer, long enough to be found.", "And now?", tools=[TOOL])
    assert whole(with_tools(body, "before the last message"), body)[1].moves
    assert not whole(with_tools(body, "behind system"), body)[1].moves


@pytest.mark.parametrize(
    "arguments", ['{"city":"Köln am Rhein","days":3}', '{"city": "Köln am Rhein", "days": 3}', "not json at all"]
)
def test_calls_are_found_however_their_arguments_are_printed(arguments: str) -> None:
    call = {"function": {"name": "get_the_weather", "arguments": arguments}}
    body = chat(SYSTEM, QUESTION)
    body["messages"] += [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "user", "content": "Thanks a lot!"},
    ]
    try:
        printed = json.dumps(json.loads(arguments), ensure_ascii=False)
    except ValueError:
        printed = arguments
    calls = f'<tool_call>\n{{"name": "get_the_weather", "arguments": {printed}}}\n</tool_call>'
    turns = [
        *chat(SYSTEM, QUESTION)["messages"],
        {"role": "assistant", "content": calls},
        {"role": "user", "content": "Thanks a lot!"},
    ]
    ids = BPE.encode(chatml(turns))
    chain, alignment = whole(ids, body)
    assert alignment.covered
    end_of_call = max(i for i, mark in enumerate(chain.marks[: list(chain.marks).index(4)]) if mark == -2)
    before_thanks = shared(ids, BPE.encode(chatml([*turns[:-1], {"role": "user", "content": "#"}])))
    assert before_thanks - 20 <= alignment.depths[end_of_call] <= before_thanks


def test_pieces_of_tools_that_the_template_leaves_out_cost_time_as_their_number_times_the_prompt() -> None:
    """Each was sought in all of the prompt: four seconds of the agent for 40,000 of them, at each look."""
    tool = {
        "type": "function",
        "function": {**TOOL["function"], "x-notes": [f"a note of no use {i}" for i in range(40_000)]},
    }
    body = chat(SYSTEM, QUESTION, tools=[tool])
    shown = json.dumps(TOOL, ensure_ascii=False) + "the router publishes boundaries " * 10_000
    system, *rest = body["messages"]
    ids = BPE.encode(chatml([{**system, "content": SYSTEM + "\n" + shown}, *rest]))
    started = time.process_time()
    assert whole(ids, body)[1].covered
    assert time.process_time() - started < 2.0


def test_content_that_is_not_in_the_tokens_costs_little_and_credits_nothing() -> None:
    """A normaliser that changes every byte must not make the search quadratic."""
    body = chat("Ä" * 200_000, "x" * 200_000)
    ids = BPE.encode(chatml(chat("a" * 2000, "y" * 2000)["messages"]))
    depths = whole(ids, body)[1].depths
    assert max(depths[:-1]) <= 5
