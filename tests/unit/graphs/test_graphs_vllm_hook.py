"""The hook's seams on the installed vLLM, its logic on stand-ins, and KV plans under vLLM's own gate."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from coldstart.graphs.errors import AlteredTable, DriverFailure, Refused
from coldstart.graphs.vllm import hook, kv_plan
from coldstart.graphs.vllm.seams import ADAPTERS, Seam, adapter

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


class Mode(Enum):
    FULL = 2
    PIECEWISE = 1


@dataclass(frozen=True)
class Descriptor:
    cg_mode: Mode
    num_tokens: int
    num_reqs: int | None = None
    num_ubatches: int = 1


class Source:
    """Restores what it is told to; the rest fails or is absent."""

    def __init__(self, usable: set[int], broken: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self._usable, self._broken = usable, broken

    def _tokens(self, key: str) -> int:
        return int(key.split("num_tokens=")[1].split(",")[0])

    def usable(self, key: str) -> bool:
        return self._tokens(key) in self._usable

    def replayable(self, key: str) -> Any:
        if self._tokens(key) in self._broken:
            raise DriverFailure("cuGraphInstantiate", "OUT_OF_MEMORY")
        return f"restored {self._tokens(key)}"

    def output(self, key: str) -> Any:
        return f"output {self._tokens(key)}"

    def attributes(self) -> Mapping[str, Any]:
        return {"hidden_states": "buffer"}


@dataclass
class Manager:
    _capture_descs: dict[Mode, list[Descriptor]]
    graphs: dict[Descriptor, Any] = field(default_factory=dict)
    hidden_states: Any = None
    _max_full_descs_to_capture: int | None = None


def _capture(self: Manager, create_forward_fn: Any, progress_bar_desc: str = "") -> None:
    for rows in self._capture_descs.values():
        self.graphs |= {row: f"captured {row.num_tokens}" for row in rows}


def _manager() -> Manager:
    full = [Descriptor(Mode.FULL, n) for n in (4, 2, 1)]
    return Manager({Mode.FULL: full, Mode.PIECEWISE: [Descriptor(Mode.PIECEWISE, 8)]})


def test_the_manager_gets_restored_graphs_and_captures_the_rest() -> None:
    manager, said = _manager(), []
    hooked = hook._manager_capture(_capture, Source({4, 1, 8}, broken={1}), said.append)
    hooked(manager, None)
    found = {(d.cg_mode.name, d.num_tokens): g for d, g in manager.graphs.items()}
    assert found == {
        ("FULL", 4): "restored 4", ("FULL", 2): "captured 2", ("FULL", 1): "captured 1",
        ("PIECEWISE", 8): "captured 8",
    }  # fmt: skip
    assert [d.num_tokens for d in manager._capture_descs[Mode.FULL]] == [4, 2, 1]
    assert manager.hidden_states == "buffer" and "captured normally" in said[0]


def test_memory_profiling_captures_as_always() -> None:
    manager = _manager()
    manager._max_full_descs_to_capture = 2
    hook._manager_capture(_capture, Source({4}), print)(manager, None)
    assert "restored 4" not in manager.graphs.values()


def test_keys_tell_descriptors_apart() -> None:
    one, other = Descriptor(Mode.FULL, 4), Descriptor(Mode.FULL, 4, num_reqs=4)
    assert hook.key_of(one, "FULL") == "FULL:num_tokens=4,num_ubatches=1"
    assert len({hook.key_of(d, m) for d in (one, other) for m in ("FULL", "PIECEWISE")}) == 4


@needs_vllm
def test_every_seam_exists_in_the_installed_vllm() -> None:
    assert hook.checked_adapter().problems() == []


@needs_vllm
def test_the_wrapper_of_the_other_runner_gets_finished_entries() -> None:
    from types import SimpleNamespace

    from vllm.compilation.cuda_graph import CUDAGraphEntry
    from vllm.forward_context import BatchDescriptor

    called: list[int] = []
    hooked = hook._runner_capture(
        lambda self, desc, mode: called.append(desc.num_tokens), Source({4}), print
    )
    wrapper = SimpleNamespace(concrete_cudagraph_entries={}, is_debugging_mode=False)
    for tokens in (4, 2):
        hooked(SimpleNamespace(model=wrapper), BatchDescriptor(tokens), Mode.FULL)
    (entry,) = wrapper.concrete_cudagraph_entries.values()
    assert (
        isinstance(entry, CUDAGraphEntry) and entry.cudagraph == "restored 4" and entry.output == "output 4"
    )
    assert called == [2]
    wrapper.is_debugging_mode = True
    hooked(SimpleNamespace(model=wrapper), BatchDescriptor(4), Mode.FULL)
    assert called == [2, 4]


@needs_vllm
def test_install_and_undo() -> None:
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    before = CudaGraphManager.capture
    undo = hook.install(Source(set()), print)
    assert CudaGraphManager.capture is not before
    undo()
    assert CudaGraphManager.capture is before


def test_another_version_is_refused_and_a_changed_seam_is_named() -> None:
    with pytest.raises(Refused, match=r"0\.31"):
        adapter("0.31.2")
    assert adapter("0.32.1+cpu") is ADAPTERS[0]
    assert "takes" in str(Seam("json", "dumps", ("obj", "indent")).problem())
    assert "no_such" in str(Seam("json", "no_such").problem())


def _plan(baseline: int = 1000) -> kv_plan.KvPlan:
    return kv_plan.KvPlan("0123456789abcdef", 700, baseline, "0.32", "one device")


def test_a_plan_round_trips_through_the_place_where_vllm_looks(tmp_path: Path) -> None:
    kv_plan.lay(_plan(), tmp_path, free=1000)
    assert kv_plan.collect(tmp_path, "0.32", "one device") == [_plan()]


def test_less_free_memory_means_profiling(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="profiles again"):
        kv_plan.lay(_plan(), tmp_path, free=999)
    assert not list(tmp_path.rglob("*.json"))


def test_a_broken_plan_is_refused(tmp_path: Path) -> None:
    target = kv_plan.lay(_plan(), tmp_path)
    target.write_text(
        json.dumps({"schema": 1, "fingerprint": "x", "kv_cache_memory_bytes": -1, "free_memory_baseline": 1})
    )
    with pytest.raises(AlteredTable):
        kv_plan.collect(tmp_path, "0.32", "one device")


@needs_vllm
def test_vllm_itself_takes_the_plan_and_applies_its_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker import startup_plan

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    kv_plan.lay(_plan(), tmp_path)
    assert startup_plan._plan_path(_plan().fingerprint) == str(kv_plan.path(tmp_path, _plan().fingerprint))
    held = startup_plan._load_plan(_plan().fingerprint)
    assert held is not None and startup_plan.PLAN_SCHEMA_VERSION == kv_plan.SCHEMA
    assert startup_plan._applicable_kv_cache_memory_bytes(held, 1000) == 700
    assert startup_plan._applicable_kv_cache_memory_bytes(held, 999) is None
