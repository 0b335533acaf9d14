"""Llama checkpoints of random weights that the benchmarks start.

A checkpoint is written by a child process, so that torch stays out of a process that measures: `python -m benchmarks.llama
SHAPE DIRECTORY`. Weights are in bfloat16, made on the GPU if there is one.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.common import ROOT

# Layers, hidden and inner size, heads, KV heads, vocabulary; 7b is Llama2-7B's.
SHAPES = {
    "tiny": (2, 256, 512, 4, 4, 32000),
    "16M": (8, 384, 1024, 6, 2, 4096),
    "125M": (16, 768, 2048, 12, 4, 16000),
    "0.5B": (24, 1280, 3456, 20, 4, 32000),
    "1B": (22, 2048, 5632, 32, 4, 32000),
    "7b": (32, 4096, 11008, 32, 32, 32000),
    "8-layers": (8, 1024, 4096, 16, 16, 4096),
}
FIELDS = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
          "vocab_size")  # fmt: skip


def build(shape: str, place: Path) -> int:
    """Write the checkpoint into an empty directory, unless it is there; return the bytes of its weights."""
    if not (place / "config.json").exists():
        draft = place.with_name(f"{place.name}.draft")
        subprocess.run([sys.executable, "-m", "benchmarks.llama", shape, str(draft)], cwd=ROOT, check=True)
        draft.replace(place)
    return sum(path.stat().st_size for path in place.glob("*.safetensors"))


def write(shape: str, place: Path) -> None:
    """Write tokenizer, configuration and weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from coldstart.models import tiny

    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    sizes = dict(zip(FIELDS, SHAPES[shape], strict=True))
    config = LlamaConfig(**sizes, max_position_embeddings=4096, bos_token_id=0, eos_token_id=1)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config)
    model.save_pretrained(place, max_shard_size="2GB")
    tiny.make_tokenizer().save_pretrained(place)


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
