"""What makes two models the same for the key: configuration, layout of the weights, tokenizer; never a path.

A hub commit fixes all three, so where one is known it stands for layout and tokenizer: the key is then the
same before and after the weights are on the disk.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coldstart.models import safetensors
from coldstart.models.resolution import ResolvedModel, weight_files

Scalar = str | int | float | bool | None

# Members of config.json that record who wrote it and where it lay, not what the model is.
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
# What a model brings to be run or to prepare its inputs and weights by. Absent from most, and then from the key.
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


def fields(model: ResolvedModel) -> dict[str, Scalar]:
    """The model.* fields without prefix: architecture, revision, digests of config, weights and tokenizer."""
    local = model.path if model.revision is None else None
    return {
        "architecture": ",".join(model.config.get("architectures") or []) or None,
        "config": config_digest(model.config),
        "revision": model.revision,
        "weights": layout_digest(local) if local else None,
        "tokenizer": files_digest(local) if local else None,
        **(_extra(local) if local else {}),
    }


def _extra(directory: Path) -> dict[str, Scalar]:
    """Digests of a model's own code and of its processors' and quantization's settings, where it has any."""
    code = sorted(path for path in directory.rglob("*.py") if path.is_file())
    settings = [path for name in _PROCESSOR_FILES if (path := directory / name).is_file()]
    groups = {"code": code, "processor": settings}
    return {name: _contents(directory, paths) for name, paths in groups.items() if paths}


def _contents(directory: Path, paths: list[Path]) -> str:
    return _digest({str(p.relative_to(directory)): hashlib.sha256(p.read_bytes()).hexdigest() for p in paths})


def config_digest(config: Mapping[str, Any]) -> str:
    """Digest of the configuration without its incidental members, at the top level only."""
    return _digest({name: value for name, value in config.items() if name not in _INCIDENTAL})


def layout_digest(directory: Path) -> str | None:
    """Digest of {tensor: (dtype, shape)} over all safetensors files; of names and sizes for other formats.

    None for a directory without weights. Values are not read: they do not change what is compiled.
    """
    files = weight_files(directory)
    if not files:
        return None
    if files[0].suffix != ".safetensors":
        return _digest({file.name: file.stat().st_size for file in files})
    layout: dict[str, Any] = {}
    for file in files:
        layout.update({entry.name: (entry.dtype, entry.shape) for entry in safetensors.entries(file)})
    return _digest(layout)


def files_digest(directory: Path) -> str:
    """Digest over the tokenizer and generation files that the directory holds."""
    held = (directory / name for name in _TOKENIZER_FILES)
    return _digest({f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in held if f.is_file()})


def _digest(value: object) -> str:
    data = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    return "sha256:" + hashlib.sha256(data).hexdigest()
