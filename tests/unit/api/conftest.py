"""A model directory."""

from pathlib import Path

import pytest


@pytest.fixture
def model(home: Path) -> str:
    """A model directory with a configuration and one weight file that is not in the safetensors format."""
    directory = home / "tiny"
    directory.mkdir()
    (directory / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (directory / "pytorch_model.bin").write_bytes(b"weights")
    return str(directory)
