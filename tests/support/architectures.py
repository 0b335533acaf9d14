"""Tiny random models of architectures that vLLM serves differently, built on first use from transformers' configurations.

Seeds, tokenizer and the spread of the logits are those of coldstart.models.tiny. A separate process builds a model, since this
imports torch and transformers:

    python -m support.architectures NAME DIRECTORY      (with tests/ on the path)
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
_VOCABULARY, _HIDDEN, _LAYERS, _HEADS, _POSITIONS = 2048, 128, 2, 2, 512
_DEEP = {"num_hidden_layers": _LAYERS, "num_attention_heads": _HEADS, "hidden_size": _HIDDEN}
_WIDE = _DEEP | {"intermediate_size": 256, "max_position_embeddings": _POSITIONS}
# Configuration class of transformers, its arguments, and the class of its model.
ARCHITECTURES: Mapping[str, tuple[str, Mapping[str, Any], str]] = {
    "gpt-neox": ("GPTNeoXConfig", _WIDE, "AutoModelForCausalLM"),
    "bert": ("BertConfig", _WIDE, "AutoModel"),
    "llama-lora": ("LlamaConfig", _WIDE | {"num_key_value_heads": 1}, "AutoModelForCausalLM"),
}
ADAPTER = "/adapter"
# On the CPU, vLLM 0.32 applies the adapter in the last slot to requests of the base model that share a batch with any adapter
# (its index -1 means none, and selects the last one: vllm-project/vllm pull request 48421). The last of two slots stays empty.
LORA = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules", "styled={adapter}")


def build(name: str, models: Path) -> Path:
    """Return the directory of one model below `models`, built on first use with its adapter.

    Raises:
        RuntimeError: The model cannot be built; the message has the output of the builder.
    """
    target = models / name
    if not (target / "config.json").exists():
        path = os.pathsep.join([str(TESTS), *sys.path])
        command = [sys.executable, "-P", "-m", "support.architectures", name, str(target)]
        environment = os.environ | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{name} cannot be built: {done.stderr[-2000:]}")
    return target


def _write(name: str, target: Path) -> None:
    import torch
    import transformers

    from coldstart.models import tiny

    config_class, arguments, model_class = ARCHITECTURES[name]
    common = {"vocab_size": _VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 3}
    # Tied weights would make every token most likely to follow itself.
    common |= {"tie_word_embeddings": False, "dtype": "float32"}
    config = getattr(transformers, config_class)(**{**common, **arguments})
    model = getattr(transformers, model_class).from_config(config)
    torch.manual_seed(0)
    tiny.init_seeded_weights(model)
    model.save_pretrained(target)
    tiny.make_tokenizer().save_pretrained(target)
    if name == "llama-lora":
        _write_adapter(target, Path(f"{target}{ADAPTER}"))


def _write_adapter(model: Path, adapter: Path) -> None:
    """Write a LoRA adapter of rank 4 for queries and values in PEFT's format, with a visible effect on the output."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    generator, held, rank = torch.Generator().manual_seed(1), {}, 4
    with safe_open(model / "model.safetensors", "pt") as tensors:
        for key in tensors.keys():  # noqa: SIM118 - not a mapping
            if key.endswith(("q_proj.weight", "v_proj.weight")):
                rows, columns = tensors.get_slice(key).get_shape()
                place = f"base_model.model.{key.removesuffix('.weight')}"
                for part, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                    held[f"{place}.lora_{part}.weight"] = torch.randn(shape, generator=generator) / 4
    adapter.mkdir()
    save_file(held, adapter / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 8, "bias": "none"}
    said |= {"target_modules": ["q_proj", "v_proj"], "base_model_name_or_path": str(model)}
    (adapter / "adapter_config.json").write_text(json.dumps(said))


if __name__ == "__main__":
    _write(sys.argv[1], Path(sys.argv[2]))
