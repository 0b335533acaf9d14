"""Compilers' caches in a bundle that has moved: Triton's own reader, and vLLM's own look-up, find what was brought."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coldstart.contract.graphs import COMPILE_REPORT, EngineTask
from coldstart.contract.plan import LaunchPlan
from coldstart.machine import runtime
from coldstart.serve import caches, prepare
from coldstart.vllm.engine import aot

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
MEMBERS = ("kernel.cubin", "kernel.json")


def _write_triton(root: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One kernel, as Triton itself puts it there; how to read it again."""
    from triton.runtime.cache import FileCacheManager

    def manager(directory: Path) -> Any:
        monkeypatch.setenv("TRITON_CACHE_DIR", str(directory))
        monkeypatch.setattr("triton.knobs.cache.dir", str(directory))
        return FileCacheManager("abc")

    held = manager(root)
    held.put_group("kernel.json", {name: held.put(name.encode(), name) for name in MEMBERS})
    return manager


@needs_triton
def test_tritons_kernels_are_found_in_a_bundle_that_has_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "offline"
    manager = _write_triton(made / "triton", monkeypatch)
    assert caches.collect(made, tmp_path / "no-vllm", tmp_path / "section") == ["triton"]
    shutil.rmtree(made)
    plain = shutil.copytree(tmp_path / "section" / "triton", tmp_path / "plain")
    assert manager(plain).get_group("kernel.json") is None  # as it lies: it names where it was
    laid = caches.lay(tmp_path / "section", tmp_path / "user" / "root")
    found = manager(laid / "triton").get_group("kernel.json")
    assert {name: Path(path).read_bytes() for name, path in found.items()} == {n: n.encode() for n in MEMBERS}
    assert all(Path(path).is_relative_to(laid) for path in found.values())


def test_what_is_laid_is_a_copy_and_made_once(tmp_path: Path) -> None:
    (tmp_path / "section" / "flashinfer").mkdir(parents=True)
    (tmp_path / "section" / "flashinfer" / "a.so").write_text("a")
    laid = caches.lay(tmp_path / "section", tmp_path / "root")
    (laid / "flashinfer" / "b.so").write_text("missed")
    assert (
        caches.lay(tmp_path / "section", tmp_path / "root") == laid
        and (laid / "flashinfer" / "b.so").exists()
    )
    assert [p.name for p in (tmp_path / "section" / "flashinfer").iterdir()] == ["a.so"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["root", "section"]


@pytest.mark.parametrize("text", ["", "[]", '{"child_paths": 3}', "{}"])
def test_a_damaged_group_stops_no_start(tmp_path: Path, text: str) -> None:
    (tmp_path / "section" / "triton" / "abc").mkdir(parents=True)
    (tmp_path / "section" / "triton" / "abc" / "__grp__kernel.json").write_text(text)
    laid = caches.lay(tmp_path / "section", tmp_path / "root")
    assert (laid / "triton" / "abc" / "__grp__kernel.json").read_text() == text


class Artefact:
    """What torch's loader would give back of an artefact of vLLM's backend."""

    def __init__(self, data: bytes) -> None:
        self.data, self.finalized = data, False
        compiled = SimpleNamespace(finalize_loading=self._finalize)
        self._artifacts = SimpleNamespace(compiled_fn=compiled)

    def _finalize(self, config: Any) -> None:
        self.finalized = True

    def source_info(self) -> Any:
        return SimpleNamespace(inlined_sources=[])

    def disable_guard_check(self) -> None:
        """Nothing is guarded."""


@pytest.fixture
def decorators(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's own module, its look-up unwrapped again afterwards; torch's deserialisation stood in for."""
    import torch
    from vllm.compilation import decorators

    def load(file: Any, f_globals: Any) -> Artefact:
        if (data := file.read()) == b"foreign":
            raise RuntimeError("made by another torch")
        return Artefact(data)

    monkeypatch.setattr(decorators, "_try_load_aot_compiled_fn", decorators._try_load_aot_compiled_fn)
    monkeypatch.setattr(torch.compiler, "load_compiled_function", load)
    return decorators


def _model() -> Any:
    from vllm.config import VllmConfig

    config = VllmConfig()
    return SimpleNamespace(
        vllm_config=config, compilation_config=config.compilation_config, _is_encoder=False, _compile_tag="",
        forward=lambda: None,
    )  # fmt: skip


def _bundle(tmp_path: Path, data: bytes, rank: str = "rank_0_0") -> Path:
    vllm_root = tmp_path / "offline"
    made = vllm_root / "torch_compile_cache" / "torch_aot_compile" / "hash-of-the-offline-path"
    (made / rank).mkdir(parents=True)
    (made / rank / "model").write_bytes(data)
    (made / "inductor_cache" / "xy").mkdir(parents=True)
    (made / "inductor_cache" / "xy" / "kernel.py").write_text("k")
    caches.collect(tmp_path / "none", vllm_root, tmp_path / "section")
    return caches.lay(tmp_path / "section", tmp_path / "laid") / caches.AOT


@pytest.mark.slow
@needs_vllm
def test_vllms_own_look_up_finds_the_artefact_under_its_own_hash(tmp_path: Path, decorators: Any) -> None:
    held = aot.Aot(_bundle(tmp_path, b"artefact"))
    held.install(decorators)
    path = tmp_path / "user" / "torch_aot_compile" / "another-hash" / "rank_0_0" / "model"
    found = decorators._try_load_aot_compiled_fn(_model(), str(path))
    assert found.data == b"artefact" and found.finalized
    assert (path.parents[1] / "inductor_cache" / "xy" / "kernel.py").read_text() == "k"
    assert (held.loaded, held.reasons) == (1, [])
    worker = SimpleNamespace(Worker=type("Worker", (), {}))
    held.report_in(worker)
    assert getattr(worker.Worker(), COMPILE_REPORT)() == {"loaded": 1, "reasons": []}


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize(
    ("data", "rank", "reason"),
    [
        (b"foreign", "rank_0_0", "rank_0_0: vLLM did not take the artefact and compiled again"),
        (b"artefact", "rank_3_0", "rank_0_0: the bundle has 0 artefacts"),
    ],
)
def test_every_miss_has_its_reason(
    tmp_path: Path, decorators: Any, data: bytes, rank: str, reason: str
) -> None:
    held = aot.Aot(_bundle(tmp_path, data, rank))
    held.install(decorators)
    path = tmp_path / "user" / "another-hash" / "rank_0_0" / "model"
    assert decorators._try_load_aot_compiled_fn(_model(), str(path)) is None
    assert (held.loaded, held.reasons) == (0, [reason])


def test_nothing_of_it_is_left_where_the_bundle_is_distrusted() -> None:
    env = caches.environment(Path("/x")) | {"VLLM_CACHE_ROOT": "/y"}
    task = EngineTask(compiled=Path("/x/aot"), restore=Path("/x/graphs"), kv_plan=[{"rank": 0}])
    plan = prepare.distrusting(LaunchPlan([], env=env, engine=task))
    assert plan.env == {"VLLM_CACHE_ROOT": "/y"} and plan.engine == EngineTask(kv_plan=[{"rank": 0}])


def test_a_gpu_start_points_its_compilers_at_the_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "targets_cpu", lambda: False)
    (tmp_path / "section" / "triton" / "abc").mkdir(parents=True)
    (tmp_path / "section" / "triton" / "abc" / "x.json").write_text(json.dumps({}))
    env, compiled = prepare.compiled_env(tmp_path / "section", tmp_path / "root")
    assert env == {
        "TRITON_CACHE_DIR": str(tmp_path / "root/triton"),
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path / "root/flashinfer"), "DG_JIT_CACHE_DIR": str(tmp_path / "root/deep_gemm"),
    }  # fmt: skip
    assert compiled == tmp_path / "root/aot"
