"""A weights plan is read back unchanged, or is refused with the reason."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from coldstart.weights import checkpoint, weights_plan
from coldstart.weights.checkpoint import InvalidWeightsPlanError

Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    save_file({"a": np.zeros(4, np.uint8), "b": np.ones((2, 2), np.float32)}, tmp_path / "one.safetensors")
    save_file({"c": np.zeros(9, np.uint8)}, tmp_path / "two.safetensors")
    return weights_plan.plan(tmp_path)


def test_a_plan_and_its_headers_go_round(document: dict[str, Any], tmp_path: Path) -> None:
    assert checkpoint.parse(document).document() == document
    bare = weights_plan.headers(sorted(tmp_path.glob("*.safetensors")))
    assert checkpoint.parse(bare).document() == bare
    assert all(file.chunks is None for file in checkpoint.parse(bare).files)
    assert weights_plan.digest(bare) != weights_plan.digest(document)


def _file(number: int, **changes: Any) -> Change:
    return lambda document: document["files"][number].update(changes)


def _tensor(**changes: Any) -> Change:
    return lambda document: document["files"][0]["tensors"][0].update(changes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.pop("chunk"), "required field `chunk`"),
        (lambda d: d.update(chunk=0), r"\$.chunk"),
        (lambda d: d.update(chunk=checkpoint.MAX_CHUNK + 1), r"\$.chunk"),
        (lambda d: d.update(chunk=True), r"\$.chunk"),
        (lambda d: d.update(files=3), r"\$.files"),
        (lambda d: d["files"].append(d["files"][0]), "occurs twice"),
        (lambda d: d["files"][1]["tensors"][0].update(name="a"), "'a' occurs twice"),
        (_file(0, name="../x"), r"\$.files\[0\].name"),
        (_file(0, name="x" * 256), r"\$.files\[0\].name"),
        (_file(0, name=""), r"\$.files\[0\].name"),
        (_file(0, size=-1), r"\$.files\[0\].size"),
        (_file(0, chunks=[]), "has 0 chunks"),
        (_file(0, chunks=["0" * 63]), r"chunks|digest"),
        (_tensor(offset=-1), "offset"),
        (_tensor(size=1 << 20), "ends after"),
        (_tensor(offset=2.0), "offset"),
        (_tensor(digest="sha256:" + "G" * 64), r"chunks|digest"),
        (_tensor(shape=[-1]), "shape"),
        (lambda d: d["files"][0]["tensors"].append(d["files"][0]["tensors"][0] | {"name": "z"}), "overlap"),
        (lambda d: d["files"][0]["tensors"][0].pop("dtype"), "required field `dtype`"),
    ],
)
def test_invalid_plan_is_refused_with_the_reason(document: dict[str, Any], change: Change, said: str) -> None:
    wrong = copy.deepcopy(document)
    change(wrong)
    with pytest.raises(InvalidWeightsPlanError, match=said):
        checkpoint.parse(wrong)
