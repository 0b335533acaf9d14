"""Six seeded Llamas of different sizes, so that starts and residents cost differently: 34 to 403 MB of weights in bfloat16."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from coldstart.machine import paths
from coldstart.model import tiny

# Hidden size and layers; 32 * hidden ** 2 bytes a layer.
SHAPES: Mapping[str, tuple[int, int]] = {
    "s1": (512, 4), "s2": (512, 8), "s3": (1024, 4), "s4": (1024, 6), "s5": (1024, 9), "s6": (1024, 12)
}  # fmt: skip
ARGS = ["--max-model-len", "256", "--kv-cache-memory-bytes", "67108864", "--enforce-eager"]


def build() -> dict[str, Path]:
    """Each model's directory, made on first use."""
    models = paths.Cache.at().models
    tokenizer = tiny.build("tiny-llama", models)
    return {name: _one(models / "bench-sized" / name, tokenizer, *shape) for name, shape in SHAPES.items()}


def _one(target: Path, tokenizer: Path, hidden: int, layers: int) -> Path:
    if target.is_dir():
        return target
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    draft = target.with_name(f".{target.name}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    given = LlamaConfig.from_pretrained(tokenizer).to_dict()
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": 4 * hidden}
    torch.manual_seed(layers)
    config = LlamaConfig(**given | sizes | {"num_attention_heads": hidden // 64, "head_dim": 64})
    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(config).save_pretrained(draft)
    for file in tokenizer.glob("*token*"):
        shutil.copy(file, draft)
    draft.rename(target)
    return target
