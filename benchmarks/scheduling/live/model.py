"""The model of the live benchmarks: a seeded Llama whose iterations take several milliseconds on one core.

The built-in tiny models decode so fast that the API server would be measured instead. Parameters: 16 million,
bfloat16, so one iteration reads 32 MB. The unembedding is wide, so that greedy answers survive a change of
summation order; special tokens score zero, so no answer ends early.
"""

from __future__ import annotations

import shutil
from math import sqrt
from pathlib import Path
from typing import Any

from coldstart.models import tiny
from coldstart.system import paths

SEED, HIDDEN, LAYERS, INTERMEDIATE = 7, 384, 10, 1024
NAME = "bench-llama"
VOCABULARY = 2000
"""Prompt token ids stay below; the model's own vocabulary is 2,048."""


def build() -> Path:
    """The model's directory, built on first use beside the built-in ones."""
    models = paths.Cache.at().models
    target = models / "bench-v1" / NAME
    if not target.is_dir():
        tokenizer = tiny.build("tiny-llama", models)
        draft = target.with_name(f".{NAME}")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        _write(tokenizer, draft)
        draft.rename(target)
    return target


def _write(tokenizer: Path, draft: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    given = LlamaConfig.from_pretrained(tokenizer).to_dict()
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "intermediate_size": INTERMEDIATE}
    config = LlamaConfig(**given | sizes | {"num_attention_heads": HIDDEN // 64, "head_dim": 64})
    model = LlamaForCausalLM(config)
    _fill(model)
    model.save_pretrained(draft)
    for file in tokenizer.glob("*token*"):
        shutil.copy(file, draft)


def _fill(model: Any) -> None:
    import torch

    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if "norm" not in name:
                wide = 3.0 if name.startswith("lm_head") else 1.0
                scale = 1.0 if "embed" in name else wide / sqrt(weight.shape[-1])
                weight.normal_(0.0, scale, generator=generator)
        model.lm_head.weight[:8] = 0.0
