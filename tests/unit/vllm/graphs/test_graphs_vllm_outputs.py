"""Inputs and outputs in the proof of vLLM's graphs: each graph writes the rows of its own tokens, into one buffer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.graphs_worker import materialize

from coldstart.graphs import tables
from coldstart.graphs.errors import GraphRefusedError
from coldstart.vllm.graphs import restore
from coldstart.vllm.graphs.hooks import refuse_unsupported
from tests.support.graphs.model import Shape, SimModel

torch = pytest.importorskip("torch")
WRITTEN = 8
# The output buffer has more than 1 MiB.
WIDE = Shape("wide", 0, width=2048, sizes=(1, WRITTEN, 192), divide=1)


def _change_row(row: int) -> Callable[[SimModel], None]:
    """Return a function that makes a process write other bytes into this output row after each replay."""

    def change(model: SimModel) -> None:
        launch, out, numbers = model.driver.launch, model.named["static:out"], count()

        def launched(executable: int, stream: int) -> None:
            launch(executable, stream)
            model.driver.write(out.base + row * 4 * WIDE.width, next(numbers).to_bytes(4, "little"))

        model.driver.launch = launched  # type: ignore[method-assign]

    return change


@pytest.mark.parametrize(("row", "proven"), [(WRITTEN - 1, [1]), (WRITTEN, [1, WRITTEN])])
def test_the_proof_compares_the_rows_of_a_graphs_own_tokens(
    here: dict[str, SimModel], tmp_path: Path, row: int, proven: list[int]
) -> None:
    found = tables.load(materialize(here, tmp_path, WIDE, _change_row(row)))
    assert sorted(graph.size for graph in found.graphs.values()) == proven
    assert all("two replays" in reason for reason in found.refused.values()) and len(
        found.refused
    ) == 3 - len(proven)


def test_the_output_buffer_is_created_before_a_restore(monkeypatch: pytest.MonkeyPatch) -> None:
    empty, manager = torch.empty, SimpleNamespace(hidden_states=None)
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, device: empty(shape, dtype=dtype))
    restore.create_output(SimpleNamespace(cudagraph_manager=manager), {"shape": [4, 8], "dtype": "bfloat16"})
    assert manager.hidden_states.shape == (4, 8) and manager.hidden_states.dtype is torch.bfloat16


def test_tokens_and_kv_are_whole_storages_and_outputs_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, kv, output = torch.zeros(4, dtype=torch.int32), torch.zeros(2, 3), torch.zeros(4, 8)
    tensors = {"kv:0": kv[1:], "static:input_buffers.input_ids": ids[:2], "static:view.input_ids": ids}
    monkeypatch.setattr(restore, "runner_tensors", lambda runner: tensors)
    model, manager = SimpleNamespace(get_vocab_size=lambda: 64), SimpleNamespace(hidden_states=output)
    runner, driver = SimpleNamespace(model_config=model, cudagraph_manager=manager), SimpleNamespace()
    full, written = {str(n): SimpleNamespace(num_tokens=n) for n in (2, 9)}, list[Any]()

    def write(descriptor: Any, warmup: bool) -> None:
        written.append((descriptor, warmup))

    found = restore.create_workload(runner, driver, full, write)  # type: ignore[arg-type]
    assert found.tokens == [((ids.data_ptr(), 16), 4)] and found.kv == [(kv.data_ptr(), 24)]
    assert found.outputs == {"2": (output.data_ptr(), 64), "9": (output.data_ptr(), 128)}
    found.write("9")
    assert written == [(full["9"], False)] and found.vocabulary == 64


def test_a_draft_model_that_reads_inner_layers_is_refused() -> None:
    parallel = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
    runner = SimpleNamespace(parallel_config=parallel, use_aux_hidden_state_outputs=True)
    with pytest.raises(GraphRefusedError, match="inner layers"):
        refuse_unsupported(runner)
