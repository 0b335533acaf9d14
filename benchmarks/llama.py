"""Llama checkpoints of random weights that the benchmarks start.

A checkpoint is written by a child process, so that torch stays out of a process that measures: `python -m benchmarks.llama
SHAPE DIRECTORY`. Weights are in bfloat16, made on the GPU if there is one.
"""

from __future__ import annotations

import json
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
}
# Twelve sizes for a host of many models: 67 to 805 MB.
SIZED = tuple(f"{layers}-layers" for layers in range(2, 25, 2))
SHAPES |= {name: (int(name.partition("-")[0]), 1024, 4096, 16, 16, 4096) for name in SIZED}
FIELDS = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
          "vocab_size")  # fmt: skip
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
          "max_position_embeddings": 4096, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
          "torch_dtype": "bfloat16", "rope_theta": 10000.0}  # fmt: skip
SHARD_BYTES = 2 << 30


def build(shape: str, place: Path) -> int:
    """Write the checkpoint into an empty directory, unless it is there; return the bytes of its weights."""
    if not (place / "config.json").exists():
        place.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, "-m", "benchmarks.llama", shape, str(place)], cwd=ROOT, check=True)
    return sum(path.stat().st_size for path in place.glob("*.safetensors"))


def tensors(shape: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a checkpoint by its name."""
    layers, hidden, inner, heads, kv_heads, vocabulary = SHAPES[shape]
    narrow = hidden // heads * kv_heads
    names: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "lm_head.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        names |= {f"{prefix}self_attn.{n}_proj.weight": (hidden, hidden) for n in "qo"}
        names |= {f"{prefix}self_attn.{n}_proj.weight": (narrow, hidden) for n in "kv"}
        names |= {f"{prefix}mlp.{n}_proj.weight": (inner, hidden) for n in ("gate", "up")}
        names |= {f"{prefix}mlp.down_proj.weight": (hidden, inner)}
        names |= {f"{prefix}{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")}
    return names


def write(shape: str, place: Path) -> None:
    """Write tokenizer, weights in files of about SHARD_BYTES, index and, at last, the configuration."""
    import torch
    from safetensors.torch import save_file

    from coldstart.models import tiny

    tiny.make_tokenizer().save_pretrained(place)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    random, items, index = (
        torch.Generator(device).manual_seed(1),
        list(tensors(shape).items()),
        dict[str, str](),
    )

    def fill(size: tuple[int, ...]) -> torch.Tensor:
        if len(size) == 1:
            return torch.ones(size, dtype=torch.bfloat16)
        weights = torch.empty(size, dtype=torch.bfloat16, device=device)
        return weights.normal_(0, 0.02, generator=random).cpu()

    files = -(-sum(2 * size[0] * size[-1] for _, size in items) // SHARD_BYTES)
    for number in range(files):
        name = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        made = {key: fill(size) for key, size in items[number::files]}
        save_file(made, str(place / name), metadata={"format": "pt"})
        index |= dict.fromkeys(made, name)
    (place / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    sizes = dict(zip(FIELDS, SHAPES[shape], strict=True))
    (place / "config.json").write_text(json.dumps(CONFIG | sizes))


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
