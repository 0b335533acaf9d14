"""Tiny random models of many architectures, built on first use from the configuration classes of transformers.

Seeds, tokenizer and the spread of the logits are those of coldstart.models.tiny. A separate process builds a model, since this
imports torch and transformers:

    python -m support.architectures NAME DIRECTORY      (with tests/ on the path)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

TESTS = Path(__file__).resolve().parents[1]
_VOCABULARY, _HIDDEN, _LAYERS, _HEADS, _POSITIONS = 2048, 128, 2, 2, 512

_DEEP = {"num_hidden_layers": _LAYERS, "num_attention_heads": _HEADS, "hidden_size": _HIDDEN}
_WIDE = _DEEP | {"intermediate_size": 256, "max_position_embeddings": _POSITIONS}
_GROUPED = _WIDE | {"num_key_value_heads": 1}
_HEAD_DIM = {"head_dim": 64}
_GEMMA = _GROUPED | _HEAD_DIM | {"query_pre_attn_scalar": 64, "sliding_window": 64}
_GPT2 = {"n_embd": _HIDDEN, "n_layer": _LAYERS, "n_head": _HEADS, "n_positions": _POSITIONS}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
_TIED = {"tie_word_embeddings": True}


@dataclass(frozen=True)
class Architecture:
    """A configuration class of transformers with its arguments, and the form of its requests.

    `vllm_args` are added to those of every row; {adapter} in them is the directory of the LoRA adapter. `asks` is the kind
    of response; `name` is the requested model name, None for the model itself. If `compiled` is false, the benchmark runs the
    model eagerly to save time.
    """

    config: str
    arguments: Mapping[str, Any]
    vllm_args: tuple[str, ...] = ()
    asks: Literal["tokens", "vector"] = "tokens"
    extra: Literal["", "adapter", "quantized"] = ""
    auto: str = "AutoModelForCausalLM"
    name: str | None = None
    dtype: str = "float32"
    compiled: bool = False


ADAPTER = "/adapter"
_LORA = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", "styled={adapter}")

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaConfig", _GROUPED),
    "mistral": Architecture("MistralConfig", _GROUPED | _HEAD_DIM | {"sliding_window": None}),
    "qwen2": Architecture("Qwen2Config", _GROUPED),
    "qwen3": Architecture("Qwen3Config", _GROUPED | _HEAD_DIM, compiled=True),
    "qwen3-moe": Architecture(
        "Qwen3MoeConfig", _GROUPED | _HEAD_DIM | _EXPERTS | {"moe_intermediate_size": 128}
    ),
    "gemma2": Architecture("Gemma2Config", _GEMMA | _TIED, compiled=True),
    "gemma3": Architecture("Gemma3TextConfig", _GEMMA | _TIED),
    "mixtral": Architecture("MixtralConfig", _GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": Architecture("OlmoeConfig", _WIDE | {"num_key_value_heads": 2} | _EXPERTS),
    "phi": Architecture("PhiConfig", _WIDE | {"num_key_value_heads": 2}, compiled=True),
    "phi3": Architecture("Phi3Config", _GROUPED | {"sliding_window": None}),
    "falcon": Architecture("FalconConfig", _DEEP | {"new_decoder_architecture": False, "multi_query": True}),
    "gpt-neox": Architecture("GPTNeoXConfig", _WIDE, compiled=True),
    "gpt2": Architecture("GPT2Config", _GPT2),
    "gptj": Architecture("GPTJConfig", _GPT2 | {"rotary_dim": 32}),
    "opt": Architecture(
        "OPTConfig",
        _DEEP | {"ffn_dim": 256, "word_embed_proj_dim": _HIDDEN, "max_position_embeddings": _POSITIONS},
    ),
    "bloom": Architecture(
        "BloomConfig", {"hidden_size": _HIDDEN, "n_layer": _LAYERS, "n_head": _HEADS} | _TIED
    ),
    "mpt": Architecture(
        "MptConfig",
        {"d_model": _HIDDEN, "n_layers": _LAYERS, "n_heads": _HEADS, "max_seq_len": _POSITIONS} | _TIED,
    ),
    "starcoder2": Architecture("Starcoder2Config", _GROUPED | {"sliding_window": None}),
    "olmo2": Architecture("Olmo2Config", _GROUPED),
    "granite": Architecture("GraniteConfig", _GROUPED),
    "stablelm": Architecture("StableLmConfig", _WIDE | {"num_key_value_heads": 2}),
    "mamba": Architecture(
        "MambaConfig", {"hidden_size": _HIDDEN, "num_hidden_layers": _LAYERS, "state_size": 16}
    ),
    "lfm2": Architecture(
        "Lfm2Config",
        _GROUPED | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    "bert": Architecture("BertConfig", _WIDE, asks="vector", auto="AutoModel"),
    "t5": Architecture(
        "T5Config",
        {"d_model": _HIDDEN, "num_layers": _LAYERS, "num_heads": _HEADS, "d_ff": 256, "d_kv": 64},
        auto="AutoModelForSeq2SeqLM",
    ),
    "llama-lora": Architecture("LlamaConfig", _GROUPED, _LORA, extra="adapter", name="styled"),
    "llama-w8a8": Architecture("LlamaConfig", _GROUPED, extra="quantized", dtype="bfloat16"),
}


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


def vllm_args(name: str, model: Path) -> tuple[str, ...]:
    """Return the vLLM arguments of this architecture, in addition to those of every row."""
    return tuple(word.format(adapter=f"{model}{ADAPTER}") for word in ARCHITECTURES[name].vllm_args)


def _write(name: str, target: Path) -> None:
    import torch
    import transformers

    from coldstart.models import tiny

    one = ARCHITECTURES[name]
    common = {"vocab_size": _VOCABULARY, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 3}
    # Tied weights would make every token most likely to follow itself.
    common |= {"tie_word_embeddings": False, "dtype": "float32"}
    config = getattr(transformers, one.config)(**{**common, **one.arguments})
    model = getattr(transformers, one.auto).from_config(config)
    torch.manual_seed(0)
    tiny.fill(model)
    model.to(getattr(torch, one.dtype)).save_pretrained(target)
    tiny.make_tokenizer().save_pretrained(target)
    if one.extra == "adapter":
        _write_adapter(target, Path(f"{target}{ADAPTER}"))
    if one.extra == "quantized":
        _quantize(target)


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


def _quantize(model: Path) -> None:
    """Quantize every linear layer but the unembedding to int8 with a scale per row (W8A8 of compressed-tensors)."""
    import torch
    from safetensors.torch import load_file, save_file

    written = {}
    for key, tensor in load_file(model / "model.safetensors").items():
        if not key.endswith("_proj.weight"):
            written[key] = tensor
            continue
        scale = tensor.abs().amax(dim=1, keepdim=True).float() / 127
        written[key] = (tensor.float() / scale).round().clamp(-128, 127).to(torch.int8)
        written[f"{key}_scale"] = scale.to(tensor.dtype)
    save_file(written, model / "model.safetensors", metadata={"format": "pt"})
    each = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**each, "strategy": "channel", "dynamic": False},
        "input_activations": {**each, "strategy": "token", "dynamic": True},
    }
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    (model / "config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    _write(sys.argv[1], Path(sys.argv[2]))
