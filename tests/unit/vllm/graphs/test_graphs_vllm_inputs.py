"""Inputs of vLLM's graphs: only the memory that relocations name is stored and copied at a start."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.graphs_worker import INPUTS, OUT, materialize, start

from coldstart.graphs import offline, tables
from coldstart.graphs.inputs import FOLDER, Inputs, StoredInputs
from coldstart.graphs.tables import SymbolRegion
from coldstart.vllm.graphs import record
from tests.support.graphs.model import SimModel

torch = pytest.importorskip("torch")
SEQUENCES, VOCABULARY, LENGTH = 1024, 151_936, 131_072
LARGE = {
    "static:sampler.penalties_state.output_bin_counts": SEQUENCES * VOCABULARY * 4,
    "static:req_states.all_token_ids": SEQUENCES * LENGTH * 4,
}
UNMAPPED = range(0x6000_0000_0000, 0x6FFF_0000_0000, 1 << 20)
Copies = list[tuple[int, int]]


def _with_large_tensors(model: SimModel) -> Copies:
    """Give the process tensors that no graph names; return the (address, bytes) that it copies from now on."""
    bases = random.SystemRandom().sample(UNMAPPED, len(LARGE))
    for base, (symbol, size) in zip(sorted(bases), LARGE.items(), strict=True):
        model.named[symbol] = SymbolRegion(symbol, size, base)
    copies, read, write = Copies(), model.driver.read, model.driver.write

    def count_read(address: int, size: int) -> bytes:
        copies.append((address, size))
        return bytes(8) if address in UNMAPPED else read(address, size)

    def count_write(address: int, data: bytes) -> None:
        copies.append((address, len(data)))
        if address not in UNMAPPED:
            write(address, data)

    model.driver.read, model.driver.write = count_read, count_write  # type: ignore[method-assign]
    return copies


def _copied(model: SimModel, copies: Copies) -> dict[str, int]:
    """Return the copied bytes of each static tensor, without the outputs."""
    static = {r.base: s for s, r in model.named.items() if s.startswith("static:") and s != "static:out"}
    found: dict[str, int] = {}
    for address, size in copies:
        if address in static:
            found[static[address]] = found.get(static[address], 0) + size
    return found


def test_only_memory_that_relocations_name_is_stored_and_copied_when_large_tensors_exist(
    here: dict[str, SimModel], tmp_path: Path
) -> None:
    processes: list[tuple[SimModel, Copies]] = []

    def watch(model: SimModel) -> None:
        processes.append((model, _with_large_tensors(model)))

    bundle = materialize(here, tmp_path, before=watch)
    found = tables.load(bundle)
    inputs = Inputs.parse_report(found.report)
    expected = {f"static:{name}" for name in INPUTS}
    assert {r.symbol for r in found.regions if r.symbol.startswith("static:")} == {OUT, *expected}
    assert {key: set(static) for key, static in inputs.static.items()} == dict.fromkeys(
        found.graphs, expected
    )
    digests = {digest for static in inputs.static.values() for digest in static.values()}
    assert {path.name for path in (bundle / FOLDER).iterdir()} == digests
    size = {region.symbol: region.size for region in found.regions}
    assert all(
        (bundle / FOLDER / d).stat().st_size == size[s] for s, d in inputs.static["FULL:num_tokens=8"].items()
    )
    session, _ = start(here, bundle, before=watch)
    assert session.fallbacks == {}
    model, copies = processes[-1]
    # One graph is the canary: its inputs are saved, written and restored.
    assert _copied(model, copies) == {symbol: 3 * size[symbol] for symbol in expected}
    assert not any(set(LARGE) & set(_copied(*process)) for process in processes)


def test_symbols_of_one_layout_contain_those_of_all_relocations(
    here: dict[str, SimModel], tmp_path: Path
) -> None:
    found = tables.load(materialize(here, tmp_path))
    possible = offline.find_possible_symbols(tmp_path)
    for key, graph in found.graphs.items():
        named = {found.regions[i] for i in graph.relocations["region"].tolist()}
        assert {r.symbol for r in named if not r.is_provided} <= possible[key]


def test_an_input_has_the_symbol_of_relocations_when_a_tensor_has_two_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = torch.zeros(4, dtype=torch.int32)
    tensors = {"static:input_buffers.input_ids": ids, "static:a_view": ids[:2], "param:w": torch.zeros(2)}
    (span,) = record.tensor_spans(record.input_tensors(tensors).values(), tensors)
    assert (span.symbol, span.size, span.base) == ("static:a_view", 16, ids.data_ptr())
    monkeypatch.setattr(record, "runner_tensors", lambda runner: tensors)
    runner: Any = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: 64))
    assert record.token_regions(runner) == {"static:a_view": (4, 64)}


def test_a_graph_is_replayed_on_its_own_inputs_when_random_numbers_are_sought(
    here: dict[str, SimModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After all captures the buffers hold the inputs of the last one: FlashAttention then reads outside its memory."""
    prepared, replayed, prepare = list[str](), list[str](), StoredInputs.prepare

    def note_and_prepare(self: StoredInputs, key: str, seed: int) -> None:
        prepared.append(key)
        prepare(self, key, seed)

    def consumes_random(graph: Any) -> bool:
        replayed.append(prepared.pop())
        return False

    monkeypatch.setattr(StoredInputs, "prepare", note_and_prepare)
    monkeypatch.setattr(record, "consumes_random", consumes_random)
    bundle = materialize(here, tmp_path)
    assert set(replayed) == set(tables.load(bundle).graphs)
