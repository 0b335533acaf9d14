"""Weight files against their index: what cannot be loaded is refused by headers alone, and the index decides between copies."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from coldstart.errors import UsageError
from coldstart.models import checkpoint_files, keys, resolution
from coldstart.weights import checkpoint, weights_plan

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def save(path: Path, **values: float) -> None:
    save_file({name: np.full(4, value, np.float32) for name, value in values.items()}, path)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    directory = tmp_path / "sharded"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    save(directory / FIRST, a=1.0)
    save(directory / SECOND, b=2.0)
    (directory / INDEX).write_text(json.dumps({"weight_map": {"a": FIRST, "b": SECOND}}))
    return directory


def check(directory: Path) -> UsageError:
    with pytest.raises(UsageError) as error:
        resolution.ensure_weights(resolution.resolve(str(directory)))
    assert error.value.hint
    return error.value


def test_check_names_the_shard_when_the_index_names_an_absent_file(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    error = check(sharded)
    assert f"{INDEX} names {SECOND}, which does not exist" in error.message


def test_check_names_the_file_when_it_is_truncated(sharded: Path) -> None:
    data = (sharded / SECOND).read_bytes()
    (sharded / SECOND).write_bytes(data[:-1])
    assert f"{SECOND} is truncated" in check(sharded).message


@pytest.mark.parametrize("document", ["{", "[]", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}'])
def test_check_names_the_index_when_it_is_invalid(document: str, sharded: Path) -> None:
    (sharded / INDEX).write_text(document)
    assert INDEX in check(sharded).message


def test_the_index_decides_when_a_tensor_is_in_two_files(sharded: Path, tmp_path: Path) -> None:
    clean = weights_plan.build_plan(sharded)
    same = shutil.copytree(sharded, tmp_path / "stale")
    save(same / SECOND, a=9.0, b=2.0)
    save(same / "another.safetensors", a=8.0)
    planned = weights_plan.build_plan(same)
    digests = [{t.name: t.digest for t in checkpoint.list_tensors(plan)} for plan in (clean, planned)]
    assert digests[0] == digests[1] and [t.name for t in checkpoint.list_tensors(planned)] == ["a", "b"]
    assert keys.compute_layout_digest(same) == keys.compute_layout_digest(sharded)


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
    return dict(keys.read_model_fields(resolution.resolve(str(model))))


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
    assert error.message == f"{model / name} is a Git LFS pointer; its content was not downloaded"
    assert error.hint == f"run `git -C '{model}' lfs pull`"


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
    with pytest.raises(UsageError, match=r"model\.safetensors\.incomplete is incomplete"):
        resolution.ensure_weights(resolution.resolve(str(model)))


def _encode(header: object) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"\0"


def _check_against_library(path: Path, framework: str, to_bytes: Callable[[Any], bytes]) -> None:
    """Compare names, shapes, dtypes and bytes of all tensors with those that `safe_open` reads."""
    found, data = checkpoint_files.read_header(path), path.read_bytes()
    assert [entry.offset for entry in found] == sorted(entry.offset for entry in found)
    with safe_open(path, framework) as reference:
        assert {entry.name for entry in found} == set(reference.keys())
        for entry in found:
            part = reference.get_slice(entry.name)
            assert (entry.dtype, list(entry.shape)) == (part.get_dtype(), part.get_shape())
            content = to_bytes(reference.get_tensor(entry.name))
            assert data[entry.offset : entry.offset + entry.size] == content


@pytest.mark.slow
@pytest.mark.parametrize("metadata", [None, {"format": "pt", "__metadata__": '{"a": 1}'}])
def test_entries_are_those_of_safe_open(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    kinds = "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint8 bool"
    shapes = [(), (0,), (3, 0, 2), (5,), (2, 3)]
    written = {
        f"{kind}.{shape}": torch.full(shape, 3.0).to(getattr(torch, kind))
        for kind in kinds.split()
        for shape in shapes
    }
    path = tmp_path / "m.safetensors"
    save_file(written, path, metadata)
    _check_against_library(path, "pt", lambda tensor: tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    assert {entry.dtype for entry in checkpoint_files.read_header(path)} >= {"BF16", "F8_E4M3", "BOOL", "I64"}


def test_a_header_over_the_librarys_cap_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 100_000_001))
        file.truncate(100_000_100)  # sparse, so that it uses no disk space
    with pytest.raises(UsageError, match="header too large"):
        checkpoint_files.read_header(path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        struct.pack("<Q", 2) + b"{",
        _encode([]),
        _encode(None),
        _encode({"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 0]}}),
        _encode({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 1]}}),
        _encode({name: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]} for name in ("a", "b")}),
    ],
)
def test_nonsense_is_named_by_its_file(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(data)
    with pytest.raises(
        UsageError, match=r"m\.safetensors is truncated or not a valid safetensors file"
    ) as caught:
        checkpoint_files.read_header(path)
    assert caught.value.hint == "fetch the model again"
