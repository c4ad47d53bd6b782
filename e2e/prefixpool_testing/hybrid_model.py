"""A tiny model of random weights with sliding-window layers between full ones, and another model's tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
WINDOW_TOKENS = 64
LAYERS = ("sliding_attention", "sliding_attention", "full_attention", "sliding_attention")


def make_hybrid(folder: Path, tokenizer: Path, vocabulary: int = 49_152) -> None:
    """Into the folder, as vLLM reads it. `tokenizer`: folder of the model whose tokenizer it gets."""
    torch.manual_seed(1)
    config = Gemma3TextConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=len(LAYERS),
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=4096,
        sliding_window=WINDOW_TOKENS,
        layer_types=list(LAYERS),
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        initializer_range=0.2,  # else all tokens are about as likely, and a wrong cache would not show
    )
    Gemma3ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    for name in TOKENIZER_FILES:
        shutil.copy(tokenizer / name, folder / name)
