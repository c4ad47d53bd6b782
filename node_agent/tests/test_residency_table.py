"""Bytes of tokens from tokenizer.json, without a tokenizer library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prefixpool_agent.residency import VocabularyError, load_table
from prefixpool_agent.residency.table import parse_table
from prefixpool_testing.tiny_bpe import TinyBpe

MODEL = Path(__file__).parent / "data" / "tiny_model"


@pytest.mark.parametrize(
    "text",
    [
        "hello world\n\n  code(x)\t= 42",
        "Grüße, naïve café; 你好世界 日本語 👩‍👩‍👧 e\u0301",
        "<|im_start|>user\nhi<|im_end|>\n",
        "\x00\x7f\u00a0\u00ad",
    ],
)
def test_the_bytes_of_a_text_s_tokens_are_the_text(text: str) -> None:
    table = load_table(MODEL)
    ids = TinyBpe(MODEL / "tokenizer.json").encode(text)
    assert b"".join(table[i] for i in ids) == text.encode()


def test_ids_that_the_model_does_not_have_are_empty() -> None:
    table = load_table(MODEL)
    assert table[10**9] == b""
    assert table[-1] == b""


def sentence_piece(vocabulary: Any, **model: Any) -> dict[str, Any]:
    return {
        "model": {"type": "BPE", "vocab": vocabulary, **model},
        "decoder": {"type": "Sequence", "decoders": [{"type": "Replace"}, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "added_tokens": [{"id": 1, "content": "<s>"}, {"id": 9, "content": "[INST]"}],
    }


def test_sentence_piece_blanks_and_byte_fallback() -> None:
    table = parse_table(sentence_piece({"<s>": 1, "<0x0A>": 2, "<0xFF>": 3, "▁the": 4, "▁": 5, "é": 6}, byte_fallback=True))
    assert [table[i] for i in (1, 2, 3, 4, 5, 6, 9)] == [b"<s>", b"\n", b"\xff", b" the", b" ", "é".encode(), b"[INST]"]


def test_unigram_vocabulary_is_a_list_in_the_order_of_ids() -> None:
    table = parse_table(sentence_piece([["<unk>", 0.0], ["▁a", -1.5], ["b", -2.0]]))
    assert [table[0], table[2]] == [b"<unk>", b"b"]


def test_added_token_beats_a_vocabulary_entry_of_the_same_id() -> None:
    document = {
        "model": {"type": "BPE", "vocab": {"Ġx": 0, "odd": 1}},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Split"}, {"type": "ByteLevel"}]},
        "added_tokens": [{"id": 1, "content": "<|end|> é"}],
    }
    table = parse_table(document)
    assert (table[0], table[1]) == (b" x", "<|end|> é".encode())


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"model": {"type": "WordPiece", "vocab": {"[UNK]": 0, "##ing": 1}}}, "neither byte-level BPE nor SentencePiece"),
        ([], "no `model` section"),
        ({"model": {"vocab": 7}}, "neither a map of ids"),
        ({"model": {"vocab": {"a": 0}, "byte_fallback": True}, "added_tokens": [{"id": 1}]}, "added_tokens"),
    ],
)
def test_other_vocabularies_are_refused_with_the_reason(tmp_path: Path, document: Any, says: str) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(VocabularyError, match=says) as caught:
        load_table(tmp_path)
    assert str(tmp_path / "tokenizer.json") in str(caught.value)


def test_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(VocabularyError, match="No such file"):
        load_table(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(VocabularyError, match="not JSON"):
        load_table(tmp_path)
