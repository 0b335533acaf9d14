"""Bundle key: MEDUSA's key <GPU, model>, extended with everything that changes the materialized state.

key = hardware.* + model.* + runtime.* + engine.*. Machines that would build equal artifacts have equal keys. Any
difference that could make an artifact invalid changes the key. Paths, host names and environment variables are not key
fields. This module imports neither torch nor vllm.

The configuration, the layout of the weights and the tokenizer identify a model. A hub commit determines all three. If the
commit is known, it replaces the digests of layout and tokenizer, so downloading the weights does not change the key.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from coldstart.artifacts.key import Key
from coldstart.contract.arguments import Arguments
from coldstart.models import checkpoint_files, relevance
from coldstart.models.resolution import ResolvedModel, weight_files
from coldstart.system import runtime
from coldstart.system.devices import hardware

ENGINE = "engine."
"""Prefix of the fields that come from vLLM's arguments."""

# Members of config.json that record its writer and its path, not the model.
_INCIDENTAL = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
# Files with a model's own code or the settings of its inputs and weights. Most models have none, so no key field.
_PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "image_processor_config.json",
    "feature_extractor_config.json",
    "quantize_config.json",
    "quantization_config.json",
    "hf_quant_config.json",
    "adapter_config.json",
    "params.json",
)


def compose_key(model: ResolvedModel, vllm_args: Arguments) -> Key:
    """Compose the bundle key of ``model`` with the given vLLM arguments on this machine, in this environment.

    Raises:
        ColdstartError: vLLM is not installed.
        UsageError: The weights are unreadable.
    """
    engine = relevance.select_engine_fields(vllm_args.parsed_flags)
    return Key(read_machine_fields() | _prefix("model", read_model_fields(model)) | _prefix("engine", engine))


def read_machine_fields() -> dict[str, relevance.Scalar]:
    """Return the key fields that depend on this machine. Raises ColdstartError if vLLM is not installed.

    The key of a CPU engine contains the number of usable CPUs: Inductor uses it to choose the depth of parallel loops
    (decide_parallel_depth, even with vLLM's dynamic_threads), and step latency depends on it. The key of a
    GPU engine contains only the CPU architecture and the driver branch, so that servers with different minor releases of a
    driver can share a bundle. CUDA graphs need the exact driver version, which is checked when they are restored.
    """
    device = hardware.read_cpu_fields()
    if not runtime.targets_cpu():
        device = {"cpu.machine": device["cpu.machine"], **hardware.read_gpu_fields()}
    return _prefix("hardware", device) | _prefix("runtime", runtime.read_runtime_fields())


def _prefix(group: str, fields: Mapping[str, relevance.Scalar]) -> dict[str, relevance.Scalar]:
    return {f"{group}.{name}": value for name, value in fields.items()}


def replace_arguments(key: Key, vllm_args: Arguments) -> Key:
    """Return a copy of `key` with the engine fields of `vllm_args`, without reading the model or the machine again."""
    fields = {name: value for name, value in key.fields.items() if not name.startswith(ENGINE)}
    engine = relevance.select_engine_fields(vllm_args.parsed_flags)
    return Key(fields | _prefix("engine", engine))


def read_model_fields(model: ResolvedModel) -> dict[str, relevance.Scalar]:
    """Return the model fields without the `model.` prefix: architecture, revision, digests of config, weights and tokenizer."""
    local = model.path if model.revision is None else None
    return {
        "architecture": ",".join(model.config.get("architectures") or []) or None,
        "config": _digest({name: value for name, value in model.config.items() if name not in _INCIDENTAL}),
        "revision": model.revision,
        "weights": compute_layout_digest(local) if local else None,
        "tokenizer": _digest(_hash_files(local, _TOKENIZER_FILES)) if local else None,
        **(_extra(local) if local else {}),
    }


def _extra(directory: Path) -> dict[str, relevance.Scalar]:
    """Return digests of the model's custom code and of its processor and quantization settings, if present."""
    code = sorted(str(path.relative_to(directory)) for path in directory.rglob("*.py") if path.is_file())
    groups = {"code": _hash_files(directory, code), "processor": _hash_files(directory, _PROCESSOR_FILES)}
    return {name: _digest(hashes) for name, hashes in groups.items() if hashes}


def _hash_files(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of each file that exists. Raises the same errors as `checkpoint_files.open_file`."""
    paths = {name: directory / name for name in names if os.path.lexists(directory / name)}
    return {name: checkpoint_files.hash_file(path) for name, path in paths.items()}


def compute_layout_digest(directory: Path) -> str | None:
    """Return the digest of {tensor: (dtype, shape)} of all safetensors files, or of file names and sizes for other formats.

    Return None for a directory without weights. Tensor values are not read, because they do not affect compiled code.
    """
    files = weight_files(directory)
    if not files:
        return None
    if files[0].suffix != ".safetensors":
        return _digest({file.name: file.stat().st_size for file in files})
    layout: dict[str, Any] = {}
    index = checkpoint_files.read_index(directory)
    for file in files:
        layout.update(
            {entry.name: (entry.dtype, entry.shape) for entry in checkpoint_files.list_tensors(file, index)}
        )
    return _digest(layout)


def _digest(value: object) -> str:
    data = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    return "sha256:" + hashlib.sha256(data).hexdigest()
