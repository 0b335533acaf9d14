"""Layers of a pipeline rank equal those of vLLM's function, which is read from its file because an import takes seconds."""

from __future__ import annotations

import ast
import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coldstart.weights.load import stage

FOUND = importlib.util.find_spec("vllm")
pytestmark = pytest.mark.skipif(FOUND is None, reason="vLLM is not installed")
Indices = Callable[[int, int, int], tuple[int, int]]


def _vllms(partition: str | None) -> Indices:
    assert FOUND is not None and FOUND.origin is not None
    file = Path(FOUND.origin).parent / "distributed" / "utils.py"
    tree = ast.parse(file.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if getattr(node, "name", "") == "get_pp_indices"]
    scope: dict[str, Any] = {
        "envs": SimpleNamespace(**{stage.PARTITION_ENV: partition}),
        "logger": logging.getLogger(__name__),
    }
    exec(compile(tree, file, "exec"), scope)
    indices: Indices = scope["get_pp_indices"]
    return indices


@pytest.mark.parametrize("count", [1, 2, 5, 12, 22, 28, 32, 36, 61, 80, 126])
def test_layers_are_divided_as_vllm_divides_them(count: int) -> None:
    theirs = _vllms(None)
    for size in range(1, 17):
        for rank in range(size):
            held = stage.layers(count, rank, size)
            assert (held.start, held.stop) == theirs(count, rank, size), (rank, size)


@pytest.mark.parametrize(
    ("count", "partition"), [(5, "1,4"), (12, "4,4,4"), (22, "5,6,6,5"), (3, " 3"), (4, "0,4")]
)
def test_a_partition_is_read_as_vllm_reads_it(count: int, partition: str) -> None:
    theirs, size = _vllms(partition), partition.count(",") + 1
    for rank in range(size):
        held = stage.layers(count, rank, size, partition)
        assert (held.start, held.stop) == theirs(count, rank, size)
