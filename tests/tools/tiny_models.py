"""Tiny models that all tests of this checkout share, because building one takes seconds, and models without tensors."""

import json
import shutil
import zlib
from importlib.metadata import version
from pathlib import Path

import pytest

from coldstart.models import tiny
from coldstart.system import runtime

_SHARED = Path(__file__).parents[2] / ".cache" / "tests"
VLLM_CACHES = _SHARED / "vllm"
"""Value of VLLM_CACHE_ROOT that tests share. Without it vLLM inspects each model's class in a process, in 15 CPU seconds."""


def place(name: str, models: Path) -> Path:
    """Copy the shared model `name` to where `tiny.build_tiny_model` looks for it below `models`, and return the copy."""
    target = location(name, models)
    if not target.is_dir():
        shutil.copytree(shared(name), target)
    return target


def location(name: str, models: Path) -> Path:
    """Return where `tiny.build_tiny_model` looks for the model `name` below `models`."""
    return models / f"tiny-v{tiny.GENERATION}" / name


def shared(name: str) -> Path:
    """Return the shared model `name`, built on first use. Other code, or another transformers, builds another one."""
    made_by = Path(tiny.__file__).read_bytes() + version("transformers").encode()
    return tiny.build_tiny_model(name, _SHARED / f"{zlib.crc32(made_by):08x}")


def write_empty(directory: Path, **config: object) -> Path:
    """Write a Llama with these members of its configuration and a weight file without tensors, and return its directory."""
    directory.mkdir()
    document = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **config}
    (directory / "config.json").write_text(json.dumps(document))
    (directory / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    return directory


def require_vllm() -> None:
    """Skip the test where no vLLM is installed, because the key of a bundle has its version."""
    if runtime.find_vllm_distribution() is None:
        pytest.skip("a key needs an installed vLLM")
