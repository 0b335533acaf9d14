"""Model fields depend on the contents of the model, not on its location."""

import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from coldstart.errors import UsageError
from coldstart.models import keys


def test_values_and_sharding_do_not_count_but_shapes_do(tmp_path: Path) -> None:
    one, two, other = (tmp_path / name for name in ("one", "two", "other"))
    for place in (one, two, other):
        place.mkdir()
    a, b = np.zeros(2, np.float32), np.zeros(3, np.float32)
    save_file({"a": a, "b": b}, one / "model.safetensors", {"format": "pt"})
    save_file({"a": a + 1}, two / "model-1.safetensors")
    save_file({"b": b + 1}, two / "model-2.safetensors")
    save_file({"a": a, "b": b.astype(np.float16)}, other / "model.safetensors")
    assert keys.layout_digest(one) == keys.layout_digest(two)
    assert keys.layout_digest(one) != keys.layout_digest(other)


@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 8, struct.pack("<Q", 4) + b"null", struct.pack("<Q", 2) + b"{"]
)
def test_a_broken_file_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(UsageError, match=r"model\.safetensors"):
        keys.layout_digest(tmp_path)
