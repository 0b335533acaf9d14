"""Outputs of vLLM's graphs: each graph writes the rows of its own tokens, into buffers of the largest graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.graphs_worker import OUT, here, materialize, start

from coldstart.graphs import tables
from coldstart.vllm.graphs import record, restore
from tests.support.graphs.model import Shape, SimModel

torch = pytest.importorskip("torch")
__all__ = ["here"]

HIDDEN = (2048, 4096)
WRITTEN = 8
GRAPH = "FULL:num_tokens=8"


def _shape(hidden: int) -> Shape:
    """Return a model whose output buffer has more than 1 MiB."""
    return Shape("wide", 0, width=hidden, sizes=(1, WRITTEN, 192), divide=1)


@pytest.fixture(params=HIDDEN)
def wide(request: pytest.FixtureRequest, here: dict[str, SimModel], tmp_path: Path) -> tuple[Path, Shape]:
    shape = _shape(request.param)
    return materialize(here, tmp_path, shape), shape


def _change_row(row: int) -> Callable[[SimModel], None]:
    """Return a function that makes a process change one byte of this output row after each replay."""

    def change(model: SimModel) -> None:
        launch, out = model.driver.launch, model.named["static:out"]

        def launched(executable: int, stream: int) -> None:
            launch(executable, stream)
            at = out.base + row * 4 * model.shape.width
            (value,) = model.driver.read(at, 1)
            model.driver.write(at, bytes([value ^ 1]))

        model.driver.launch = launched  # type: ignore[method-assign]

    return change


def test_canary_matches_in_a_new_process_when_other_rows_differ(
    here: dict[str, SimModel], wide: tuple[Path, Shape]
) -> None:
    bundle, shape = wide
    assert start(here, bundle, shape=shape, canary="all")[0].fallbacks() == {}
    places = tables.load(bundle).report["workload"]["outputs"]
    assert places[GRAPH] == [[OUT, 0, WRITTEN * shape.width * 4]]
    changed = start(here, bundle, shape=shape, canary="all", before=_change_row(WRITTEN - 1))[0]
    assert f"{GRAPH}: its outputs differ from the proof" in changed.fallbacks()["*"]
    unwritten = start(here, bundle, shape=shape, before=_change_row(WRITTEN))[0]
    assert unwritten.fallbacks() == {}


def _like(*shape: int) -> record.Like:
    return {"shape": list(shape), "dtype": "bfloat16"}


def test_auxiliary_states_are_outputs_and_created_before_a_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ModelCudaGraphManager has them when a draft model reads hidden states of inner layers."""
    states = [torch.zeros(4, 8, dtype=torch.bfloat16) for _ in range(3)]
    manager = SimpleNamespace(hidden_states=states[0], aux_hidden_states=states[1:])
    held = record.manager_attributes(SimpleNamespace(cudagraph_manager=manager))
    names = ["hidden_states", "aux_hidden_states.0", "aux_hidden_states.1"]
    assert held == dict.fromkeys(names, _like(4, 8))
    assert record.places(held, 2) == [(record.MANAGER + name, 0, 2 * 8 * 2) for name in names]
    assert record.places(held, 9) == [(record.MANAGER + name, 0, 4 * 8 * 2) for name in names]
    assert record.input_tensors({record.MANAGER + name: states[0] for name in names}) == {}
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, device: empty(shape, dtype=dtype))
    here = SimpleNamespace(cudagraph_manager=SimpleNamespace(hidden_states=None, aux_hidden_states=[]))
    created = restore.make_attributes(here, held)
    assert record.manager_attributes(here) == held and len(created["aux_hidden_states"]) == 2
    restore.remove_attributes(here, created)
    assert here.cudagraph_manager == SimpleNamespace(hidden_states=None, aux_hidden_states=[])
