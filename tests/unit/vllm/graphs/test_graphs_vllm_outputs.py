"""Outputs of vLLM's graphs: each graph writes the rows of its own tokens, into buffers of the largest graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.graphs_worker import OUT, materialize, start

from coldstart.graphs import tables
from coldstart.graphs.errors import GraphRefusedError
from coldstart.vllm.graphs import record, restore
from coldstart.vllm.graphs.hooks import refuse_unsupported
from tests.support.graphs.model import Shape, SimModel

torch = pytest.importorskip("torch")
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
    assert start(here, bundle, shape=shape, canary="all")[0].fallbacks == {}
    places = tables.load(bundle).report["workload"]["outputs"]
    assert places[GRAPH] == [[OUT, 0, WRITTEN * shape.width * 4]]
    changed = start(here, bundle, shape=shape, canary="all", before=_change_row(WRITTEN - 1))[0]
    assert f"{GRAPH}: its outputs differ from the proof" in changed.fallbacks["*"]
    unwritten = start(here, bundle, shape=shape, before=_change_row(WRITTEN))[0]
    assert unwritten.fallbacks == {}


def test_the_output_buffer_is_created_before_a_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    empty, manager = torch.empty, SimpleNamespace(hidden_states=None)
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, device: empty(shape, dtype=dtype))
    restore.create_output(SimpleNamespace(cudagraph_manager=manager), {"shape": [4, 8], "dtype": "bfloat16"})
    buffer = manager.hidden_states
    assert buffer.shape == (4, 8) and buffer.dtype is torch.bfloat16
    assert record.places(buffer, 2) == [(OUT, 0, 2 * 8 * 2)] and record.places(buffer, 9) == [
        (OUT, 0, 4 * 8 * 2)
    ]
    assert record.input_tensors({OUT: buffer}) == {}


def test_a_draft_model_that_reads_inner_layers_is_refused() -> None:
    parallel = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
    runner = SimpleNamespace(parallel_config=parallel, use_aux_hidden_state_outputs=True)
    with pytest.raises(GraphRefusedError, match="inner layers"):
        refuse_unsupported(runner)
