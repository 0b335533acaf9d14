"""Files of a model directory that are not what their name says: each is refused with its name, the reason and a hint."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from coldstart.errors import UsageError
from coldstart.models import keys, resolution

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 123\n" % (b"0" * 64)
EMPTY_SHARD = struct.pack("<Q", 2) + b"{}"
NAMES = ("config.json", "model.safetensors.index.json", "model.safetensors", "tokenizer.json")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory without tensors."""
    directory = tmp_path / "my model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"architectures": ["X"], "limit": [0.0, float("inf")]}))
    (directory / "model.safetensors").write_bytes(EMPTY_SHARD)
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    (directory / "tokenizer.json").write_text("{}")
    return directory


def _look_up(model: Path) -> dict[str, object]:
    return dict(keys.model_fields(resolution.resolve(str(model))))


def _refused(model: Path) -> UsageError:
    with pytest.raises(UsageError) as caught:
        _look_up(model)
    return caught.value


def test_model_is_read_when_its_configuration_has_infinity_and_equal_members(model: Path) -> None:
    assert _look_up(model)["architecture"] == "X"
    # As transformers does: the last of equal members counts.
    (model / "config.json").write_text('{"architectures": ["X"], "architectures": ["Y"]}')
    assert _look_up(model)["architecture"] == "Y"


@pytest.mark.parametrize("name", NAMES)
def test_pointer_is_named_with_the_command_that_gets_the_content(model: Path, name: str) -> None:
    (model / name).write_bytes(LFS)
    error = _refused(model)
    assert error.message == f"{model / name} is a Git LFS pointer, without the content"
    assert error.hint == f"git -C '{model}' lfs pull"


@pytest.mark.parametrize("name", NAMES)
def test_link_without_the_content_is_named(model: Path, name: str) -> None:
    (model / name).unlink()
    (model / name).symlink_to("../.git/annex/objects/aa/bb/SHA256E-s1--0/SHA256E-s1--0")
    error = _refused(model)
    assert str(model / name) in error.message and "does not exist" in error.message


def test_unfinished_download_is_named_when_there_are_no_weights(model: Path) -> None:
    for name in NAMES[1:3]:
        (model / name).unlink()
    (model / "model.safetensors.incomplete").write_bytes(b"12")
    with pytest.raises(UsageError, match=r"model\.safetensors\.incomplete was not finished"):
        resolution.ensure_weights(resolution.resolve(str(model)))
