"""The header reader accepts and refuses the same files as the safetensors library."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError, safe_open

from coldstart.errors import UsageError
from coldstart.models import checkpoint_files


def _write(path: Path, header: Any, body: bytes = b"") -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path


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
def test_entries_are_those_of_safe_open_when_torch_tensors_are_saved(
    tmp_path: Path, metadata: dict[str, str] | None
) -> None:
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


def test_a_header_over_the_librarys_cap_is_refused_by_both(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", checkpoint_files.MAX_HEADER + 1))
        file.truncate(checkpoint_files.MAX_HEADER + 100)  # sparse, so that it uses no disk space
    with pytest.raises(UsageError, match="its header has 100000001 bytes"):
        checkpoint_files.read_header(path)
    with pytest.raises(SafetensorError, match=r"HeaderTooLarge|header too large"), safe_open(path, "np"):
        pass


@pytest.mark.parametrize(
    "header",
    [
        [],
        None,
        {"a": {}},
        {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0]}},
        {"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 0]}},
        {"a": {"dtype": "U8", "shape": [1], "data_offsets": [-1, 0]}},
        {"a": {"dtype": "U8", "shape": ["1"], "data_offsets": [0, 1]}},
        {"a": {"dtype": "U8", "shape": [1.5], "data_offsets": [0, 1]}},
        {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, True]}},
        {"a": {"dtype": "U8", "shape": [-1, -1], "data_offsets": [0, 1]}},
        {"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 1]}},
        {"a": {"dtype": "F16", "shape": [1], "data_offsets": [0, 1]}},
        {name: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]} for name in ("a", "b")},
    ],
)
def test_nonsense_is_named_by_its_file(tmp_path: Path, header: Any) -> None:
    path = _write(tmp_path / "m.safetensors", header, b"\0")
    with pytest.raises(UsageError, match=r"m\.safetensors is not a valid safetensors file") as caught:
        checkpoint_files.read_header(path)
    assert caught.value.hint == "fetch the model again"
    with pytest.raises(SafetensorError), safe_open(path, "np"):
        pass
