"""A LoRA adapter of random weights for a Llama."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 8
MODULES = ("q_proj", "v_proj")


def make_adapter(folder: Path, model: Path, seed: int) -> None:
    """Into the folder, as vLLM reads it; its effect is large enough to change what is said."""
    config = json.loads((model / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    outputs = {"q_proj": hidden, "v_proj": hidden // heads * config["num_key_value_heads"]}
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for module in MODULES:
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{name}.lora_A.weight"] = 0.1 * torch.randn(RANK, hidden, generator=draw)
            tensors[f"{name}.lora_B.weight"] = 0.1 * torch.randn(outputs[module], RANK, generator=draw)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(MODULES), "bias": "none"})
    )
