"""Compiler caches of a moved bundle: Triton's reader and vLLM's look-up find the entries."""

import errno
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from coldstart.artifacts import sign
from coldstart.artifacts.store import Store
from tools.bundles import publish_sections
from tools.command_line import Run, run

from coldstart.contract.arguments import Arguments
from coldstart.contract.graphs import EngineTask
from coldstart.contract.plan import LaunchPlan
from coldstart.launch import caches, ladder, prepare
from coldstart.launch.fetch import ServerWeights
from coldstart.launch.modes import FreshMode
from coldstart.launch.planning import ServeRequest
from coldstart.models import inspection
from coldstart.models.inspection import BundleLookup
from coldstart.models.resolution import ResolvedModel
from coldstart.system import paths, runtime
from coldstart.system.paths import Cache
from coldstart.vllm.engine import compiled

__all__ = ["run"]

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
MEMBERS = ("kernel.cubin", "kernel.json")


def _write_triton(root: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Store one kernel with Triton and return a function that reads it."""
    from triton.runtime.cache import FileCacheManager

    def manager(directory: Path) -> Any:
        monkeypatch.setenv("TRITON_CACHE_DIR", str(directory))
        monkeypatch.setattr("triton.knobs.cache.dir", str(directory))
        return FileCacheManager("abc")

    held = manager(root)
    held.put_group("kernel.json", {name: held.put(name.encode(), name) for name in MEMBERS})
    return manager


@needs_triton
def test_triton_finds_its_kernels_in_a_moved_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tmp_path / "offline"
    manager = _write_triton(made / "triton", monkeypatch)
    assert caches.collect_caches(made, tmp_path / "no-vllm", tmp_path / "section") == ["triton"]
    shutil.rmtree(made)
    plain = shutil.copytree(tmp_path / "section" / "triton", tmp_path / "plain")
    assert not manager(plain).get_group(
        "kernel.json"
    )  # None or {}, depending on the version of Triton: its paths do not exist
    laid = caches.copy_section(tmp_path / "section", tmp_path / "user")
    found = manager(laid / "triton").get_group("kernel.json")
    assert {name: Path(path).read_bytes() for name, path in found.items()} == {n: n.encode() for n in MEMBERS}
    assert all(Path(path).is_relative_to(laid) for path in found.values())


@pytest.mark.parametrize("text", ["", "[]", '{"child_paths": 3}', "{}"])
def test_a_damaged_group_stops_no_start(tmp_path: Path, text: str) -> None:
    (tmp_path / "section" / "triton" / "abc").mkdir(parents=True)
    (tmp_path / "section" / "triton" / "abc" / "__grp__kernel.json").write_text(text)
    laid = caches.copy_section(tmp_path / "section", tmp_path / "root")
    assert (laid / "triton" / "abc" / "__grp__kernel.json").read_text() == text


class Artifact:
    """Fake of an artifact that torch's loader returns for vLLM's backend."""

    def __init__(self, data: bytes) -> None:
        self.data, self.finalized = data, False
        compiled = SimpleNamespace(finalize_loading=self._finalize)
        self._artifacts = SimpleNamespace(compiled_fn=compiled)

    def _finalize(self, config: Any) -> None:
        self.finalized = True

    def source_info(self) -> Any:
        return SimpleNamespace(inlined_sources=[])

    def disable_guard_check(self) -> None:
        """Do nothing; the fake has no guards."""


@pytest.fixture
def decorators(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return vLLM's module with a fake of torch's deserialisation; the look-up is unwrapped afterwards."""
    import torch
    from vllm.compilation import decorators

    def load(file: Any, f_globals: Any) -> Artifact:
        if (data := file.read()) == b"foreign":
            raise RuntimeError("made by another torch")
        return Artifact(data)

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
    caches.collect_caches(tmp_path / "none", vllm_root, tmp_path / "section")
    return caches.copy_section(tmp_path / "section", tmp_path / "laid") / caches.AOT


@pytest.mark.slow
@needs_vllm
def test_vllms_own_look_up_finds_the_artifact_under_its_own_hash(
    tmp_path: Path, decorators: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.compilation.counter import compilation_counter

    monkeypatch.setattr(compilation_counter, "num_inductor_compiles", 0)
    held = compiled.AotArtifacts(_bundle(tmp_path, b"artifact"))
    assert held.compile_reasons == ["vLLM requested no ahead-of-time artifact"]
    held.wrap_loader(decorators)
    path = tmp_path / "user" / "torch_aot_compile" / "another-hash" / "rank_0_0" / "model"
    found = decorators._try_load_aot_compiled_fn(_model(), str(path))
    assert found.data == b"artifact" and found.finalized
    assert (path.parents[1] / "inductor_cache" / "xy" / "kernel.py").read_text() == "k"
    assert (held.loaded_count, held.compile_reasons) == (1, [])
    caches_only = compiled.AotArtifacts(tmp_path / "none")
    assert caches_only.compile_reasons == []
    # PyTorch before 2.12 compiles after it has loaded an artifact.
    monkeypatch.setattr(compilation_counter, "num_inductor_compiles", 3)
    assert caches_only.compile_reasons == ["vLLM requested no ahead-of-time artifact"]
    (reason,) = held.compile_reasons
    assert reason == "vLLM loaded the artifact and compiled 3 graphs again: it contains no kernels for them"


@pytest.mark.slow
@needs_vllm
def test_vllm_finds_the_autotuner_in_a_moved_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import VllmConfig
    from vllm.model_executor.warmup import flashinfer_autotune_cache as vllms

    def choices(root: Path) -> Path:
        for name, value in caches.build_environment(root).items():
            monkeypatch.setenv(name, value)
        return vllms.resolve_flashinfer_autotune_file(SimpleNamespace(vllm_config=VllmConfig()))

    vllms.write_flashinfer_autotune_cache(choices(tmp_path / "offline"), b"{}")
    collected = caches.collect_caches(tmp_path / "offline", tmp_path / "no-vllm", tmp_path / "section")
    assert collected == ["flashinfer_autotune"]
    shutil.rmtree(tmp_path / "offline")
    assert choices(caches.copy_section(tmp_path / "section", tmp_path / "user")).read_bytes() == b"{}"


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize(
    ("data", "rank", "reason"),
    [
        (b"foreign", "rank_0_0", "rank_0_0: vLLM rejected the artifact and compiled again"),
        (b"artifact", "rank_3_0", "rank_0_0: the bundle has 0 artifacts"),
    ],
)
def test_miss_has_its_reason(tmp_path: Path, decorators: Any, data: bytes, rank: str, reason: str) -> None:
    held = compiled.AotArtifacts(_bundle(tmp_path, data, rank))
    held.wrap_loader(decorators)
    path = tmp_path / "user" / "another-hash" / "rank_0_0" / "model"
    assert decorators._try_load_aot_compiled_fn(_model(), str(path)) is None
    assert (held.loaded_count, held.compile_reasons) == (0, [reason])


def test_ranks_copy_the_artifacts_once_when_they_start_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, copied = compiled.AotArtifacts(_bundle(tmp_path, b"artifact")), list[Any]()

    def copy_slowly(*places: Path, **options: Any) -> None:
        time.sleep(0.2)
        copied.append(shutil.copytree(*places, **options))

    monkeypatch.setattr(compiled, "shutil", SimpleNamespace(copytree=copy_slowly))
    path = tmp_path / "user" / "another-hash" / "rank_0_0" / "model"
    with ThreadPoolExecutor(2) as ranks:
        assert all(ranks.map(held.copy_from_bundle, [path, path])) and len(copied) == 1


def test_caches_of_an_untrusted_bundle_are_not_used() -> None:
    env = caches.build_environment(Path("/x")) | {"VLLM_CACHE_ROOT": "/y"}
    task = EngineTask(compiled=Path("/x/aot"), restore=Path("/x/graphs"), kv_plan=[{"rank": 0}])
    plan = prepare.drop_restored_state(LaunchPlan([], env=env, engine=task))
    assert plan.env == {"VLLM_CACHE_ROOT": "/y"} and plan.engine == EngineTask(kv_plan=[{"rank": 0}])


@pytest.fixture
def started(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], LaunchPlan]:
    """Return started(), which returns the plan of a GPU start from a trusted bundle with Triton's cache."""
    monkeypatch.setattr(runtime, "targets_cpu", lambda: False)
    (tmp_path / "section" / "triton" / "abc").mkdir(parents=True)
    (tmp_path / "section" / "triton" / "abc" / "x.json").write_text(json.dumps({}))
    signer = sign.load_host_key(paths.state_dir())
    bundle = publish_sections(Store(Cache.at().bundles), signer=signer, compile=tmp_path / "section")
    model = ResolvedModel("tiny", None, "org/tiny", None, {})
    lookup = BundleLookup(model, Arguments(), Cache.at(), bundle.key, bundle)
    weights = ServerWeights(lookup.model, Arguments())
    return lambda: prepare.plan_with_bundle(lookup, bundle, weights, trust=inspection.trust)


def _of_compile(plan: LaunchPlan) -> list[str]:
    return [step.reason for step in plan.fallbacks if step.stage == "compile"]


def test_caches_where_others_may_write_are_not_used(started: Callable[[], LaunchPlan]) -> None:
    paths.compiled_dir().mkdir(parents=True)
    paths.compiled_dir().chmod(0o777)
    plan = started()
    assert "mode 0777, expected 0 and 0700" in _of_compile(plan)[0].replace(str(os.getuid()), "0")
    assert plan.engine.compiled is None and not set(caches.VARIABLES) & set(plan.env)


def test_full_disk_stops_no_start(started: Callable[[], LaunchPlan], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, target: Path, **_: object) -> None:
        target.mkdir()
        (target / "half").write_text("x")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(caches.shutil, "copytree", full)
    plan = started()
    assert "No space left on device" in _of_compile(plan)[0] and plan.engine.compiled is None
    assert [left for left in paths.compiled_dir().iterdir() if left.is_dir()] == []


def test_prune_removes_the_caches_of_a_bundle(started: Callable[[], LaunchPlan], run: Run) -> None:
    started()
    (root,) = filter(Path.is_dir, paths.compiled_dir().glob("[!.]*"))
    assert str(root) not in json.loads(run("prune", "--format=json").stdout)["unpacked"] and root.is_dir()
    assert str(root) in json.loads(run("prune", "org/tiny", "--format=json").stdout)["unpacked"]
    assert not root.exists()


GCC = shutil.which("gcc")


@pytest.fixture
def shared_object(tmp_path: Path) -> Path:
    made = tmp_path / "cache" / "inductor" / "ab" / "kernel.so"
    made.parent.mkdir(parents=True)
    source = tmp_path / "kernel.c"
    source.write_text("double table[64] = {1, 2, 3}; double kernel(double x) { return x * table[2]; }")
    subprocess.run([str(GCC), "-shared", "-fPIC", "-o", made, source], check=True)
    return made


def _loads(path: Path) -> bool:
    done = subprocess.run([sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(path)!r})"], check=False)
    return done.returncode == 0


@pytest.mark.skipif(GCC is None, reason="no gcc")
def test_every_unloadable_file_is_found(shared_object: Path, tmp_path: Path) -> None:
    content = shared_object.read_bytes()
    cut = tmp_path / "cut.so"
    for length in range(0, len(content), len(content) // 9):
        cut.write_bytes(content[:length])
        assert _loads(cut) or list(caches.find_truncated_libraries(tmp_path)) == [cut]


@pytest.mark.skipif(GCC is None, reason="no gcc")
def test_file_in_use_by_a_linker_is_retained(shared_object: Path, tmp_path: Path) -> None:
    with shared_object.open("wb"):
        writer = subprocess.Popen(["sleep", "60"], stdout=shared_object.open("ab"))
    try:
        assert caches.remove_truncated_libraries(tmp_path / "cache") == []
    finally:
        writer.kill()
        writer.wait()
    assert len(caches.remove_truncated_libraries(tmp_path / "cache")) == 1


@pytest.mark.skipif(GCC is None, reason="no gcc")
def test_start_removes_truncated_files_first(
    shared_object: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Begun(Exception): ...

    def fail(*_: object) -> None:
        raise Begun

    shared_object.write_bytes(b"")
    monkeypatch.setattr(FreshMode, "launch", fail)
    plan = LaunchPlan(Arguments([]), env={"VLLM_CACHE_ROOT": str(tmp_path / "cache")})
    request = ServeRequest(type("Found", (), {"model": type("Model", (), {"config": {}})})(), mode="fresh")  # type: ignore[arg-type]
    with pytest.raises(Begun):
        ladder.start_server(request, plan)
    assert not shared_object.exists()
