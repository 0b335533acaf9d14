"""Weight files against their index: what cannot be loaded is refused by headers alone, and the index decides between copies."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from coldstart.errors import UsageError
from coldstart.models import keys, resolution
from coldstart.weights import checkpoint, weights_plan

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def save(path: Path, **values: float) -> None:
    save_file({name: np.full(4, value, np.float32) for name, value in values.items()}, path)


def write_index(directory: Path, files: object) -> None:
    (directory / INDEX).write_text(json.dumps({"weight_map": files}))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    directory = tmp_path / "sharded"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    save(directory / FIRST, a=1.0)
    save(directory / SECOND, b=2.0)
    write_index(directory, {"a": FIRST, "b": SECOND})
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
    clean = weights_plan.plan(sharded)
    same = shutil.copytree(sharded, tmp_path / "stale")
    save(same / SECOND, a=9.0, b=2.0)
    save(same / "another.safetensors", a=8.0)
    planned = weights_plan.plan(same)
    digests = [{t.name: t.digest for t in checkpoint.list_tensors(plan)} for plan in (clean, planned)]
    assert digests[0] == digests[1] and [t.name for t in checkpoint.list_tensors(planned)] == ["a", "b"]
    assert keys.layout_digest(same) == keys.layout_digest(sharded)
