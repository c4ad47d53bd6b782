"""Texts and tokens of the sim: reversible, stable under appending, and cut like a byte-level vocabulary."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixpool_agent.sim.detokenizer import Detokenizer
from prefixpool_agent.sim.tokenizer import END_OF_TEXT, IM_END, IM_START, SimTokenizer, SimTokenTable, token_bytes

TEXT = st.text(alphabet=st.characters(exclude_categories=("Cs",)), max_size=80)


def pieces(text: str) -> list[str]:
    return [token_bytes(token).decode("utf-8", "replace") for token in SimTokenizer().encode(text)]


@given(TEXT)
def test_decoding_gives_the_text_back(text: str) -> None:
    tokenizer = SimTokenizer()
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


@given(TEXT)
def test_ids_fit_u32_and_the_table_knows_their_bytes(text: str) -> None:
    table = SimTokenTable()
    tokens = SimTokenizer().encode(text)
    assert all(0 <= token < 1 << 32 for token in tokens)
    assert b"".join(table[token] for token in tokens) == text.encode()


@given(TEXT, TEXT)
def test_appending_text_behind_a_special_token_changes_nothing_before_it(first: str, second: str) -> None:
    tokenizer = SimTokenizer()
    head = tokenizer.encode(first + "<|im_end|>")
    assert tokenizer.encode(first + "<|im_end|>" + second)[: len(head)] == head


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello world", ["Hell", "o", " wor", "ld"]),
        ("in 2024, 17", ["in", " 202", "4", ",", " 17"]),
        ("a\n\n\nb", ["a", "\n\n\n", "b"]),
        ("  x", [" ", " x"]),
        ("f(x)!", ["f", "(", "x", ")!"]),
        ("世界", ["世", "界"]),
        ("", []),
    ],
)
def test_pieces(text: str, expected: list[str]) -> None:
    assert pieces(text) == expected


def test_a_character_of_four_bytes_lies_across_two_tokens() -> None:
    tokens = SimTokenizer().encode("🙂")
    assert [len(token_bytes(token)) for token in tokens] == [3, 1]


def test_special_tokens_have_ids_of_their_own() -> None:
    tokens = SimTokenizer().encode("<|im_start|>x<|im_end|><|endoftext|>")
    assert [tokens[0], tokens[2], tokens[3]] == [IM_START, IM_END, END_OF_TEXT]
    assert SimTokenizer().decode(tokens) == "x"


def test_lone_surrogates_do_not_break_it() -> None:
    assert SimTokenizer().encode("a\ud800b")


@pytest.mark.parametrize("token", [3, 1000, 99_999_999, 1 << 32, 0x50000000, 0xC0000000, 0x1FFFFFFF, -1])
def test_ids_that_no_text_can_have(token: int) -> None:
    with pytest.raises(KeyError):
        token_bytes(token)


def streamed(text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], Detokenizer]:
    tokens, detokenizer = SimTokenizer().encode(text), Detokenizer(stop)
    out: list[str] = []
    for i, token in enumerate(tokens):
        out.append(detokenizer.push(token, last=i == len(tokens) - 1))
        if detokenizer.matched is not None:
            break
    return out, detokenizer


@given(TEXT)
def test_streamed_text_is_the_text_without_broken_characters(text: str) -> None:
    assert "".join(streamed(text)[0]) == SimTokenizer().decode(SimTokenizer().encode(text))


def test_half_a_character_is_held_back() -> None:
    assert streamed("🙂")[0] == ["", "🙂"]


def test_a_stop_string_across_tokens_ends_the_text_before_it() -> None:
    out, detokenizer = streamed("one two three", ("wo th",))
    assert "".join(out) == "one t"
    assert detokenizer.matched == "wo th"


def test_text_that_only_might_be_a_stop_string_appears_in_the_end() -> None:
    out, detokenizer = streamed("abcd abc", ("abcx",))
    assert "".join(out) == "abcd abc"
    assert detokenizer.matched is None
