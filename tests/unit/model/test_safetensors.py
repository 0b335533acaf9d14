"""The header reader agrees with the format's own library, on what it reads and on what it refuses."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from coldstart.errors import Usage
from coldstart.model import safetensors


def _write(path: Path, header: Any, body: bytes = b"") -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path


def test_entries_are_what_the_library_reads(tmp_path: Path) -> None:
    path, chance = tmp_path / "m.safetensors", np.random.default_rng(1)
    written = {f"t{n}": chance.random((n, 3), dtype=np.float32) for n in range(5)} | {"u": np.uint8(7)[None]}
    save_file(written, path, {"format": "pt"})
    data = path.read_bytes()
    found = safetensors.entries(path)
    assert [entry.offset for entry in found] == sorted(entry.offset for entry in found)
    with safe_open(path, "np") as reference:
        assert {entry.name for entry in found} == set(reference.keys())
        for entry in found:
            kept = reference.get_slice(entry.name)
            assert (entry.dtype, list(entry.shape)) == (kept.get_dtype(), kept.get_shape())
            assert (
                data[entry.offset : entry.offset + entry.size] == reference.get_tensor(entry.name).tobytes()
            )


def test_a_header_over_the_librarys_cap_is_refused_by_both(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", safetensors.MAX_HEADER + 1))
        file.truncate(safetensors.MAX_HEADER + 100)  # sparse: it takes no room
    with pytest.raises(Usage, match="a header of 100000001 bytes"):
        safetensors.entries(path)
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
    ],
)
def test_nonsense_is_named_by_its_file(tmp_path: Path, header: Any) -> None:
    path = _write(tmp_path / "m.safetensors", header, b"\0")
    with pytest.raises(Usage, match=r"m\.safetensors is no safetensors file") as caught:
        safetensors.entries(path)
    assert caught.value.mend == "fetch the model again"
    with pytest.raises(SafetensorError), safe_open(path, "np"):
        pass
