"""Materialization around the engine's processes: measurement of the KV size, and omitted sections after a late failure."""

import json
import os
import socketserver
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from coldstart.artifacts.store import Store
from support.fake_nvml import GIB, Fake
from support.fake_server import Handler
from tools import bundles
from tools.bundles import key

from coldstart.contract.arguments import Arguments
from coldstart.contract.environment import VLLM_SERVER_DEV_MODE
from coldstart.contract.graphs import WORKER_REPORT, EngineTask
from coldstart.contract.plan import LaunchPlan
from coldstart.errors import CommandFailedError
from coldstart.launch import pruning
from coldstart.materialize import assembly, materialize
from coldstart.materialize.assembly import Assembly, VerificationFailedError, require_fast_path
from coldstart.materialize.materialize import MaterializationPlan, create_workspace
from coldstart.materialize.options import Options, no_progress
from coldstart.models.inspection import BundleLookup
from coldstart.models.resolution import ResolvedModel
from coldstart.system import fingerprint, runtime
from coldstart.system.devices import nvml
from coldstart.system.paths import Cache
from coldstart.system.snapshot import runtime_image
from coldstart.weights import weights_plan as weights


@contextmanager
def _phase(name: str) -> Iterator[Callable[[str], None]]:
    yield lambda step: None


PROCESS = SimpleNamespace(pid=os.getpid(), signal=lambda number: None, wait=lambda: 0)


@pytest.fixture
def materialization(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Assembly:
    monkeypatch.setattr(assembly.server_process, "start_fresh", lambda plan, output: (PROCESS, None))
    return Assembly(ResolvedModel("m", tmp_path, None, None, {}), Arguments(), "sha256:00", tmp_path, _phase)


@pytest.mark.parametrize("on_cpu", [False, True])
def test_the_kv_cache_of_a_gpu_is_sized_in_a_second_start_over_warm_caches(
    materialization: Assembly, monkeypatch: pytest.MonkeyPatch, on_cpu: bool
) -> None:
    """A cold start's profiling charges the peak of its compilation to the model (vllm#54122, #54383)."""
    started: list[tuple[LaunchPlan, tuple[str, ...]]] = []

    def engine(module: str, plan: LaunchPlan, *arguments: str) -> None:
        started.append((plan, arguments))

    monkeypatch.setattr(runtime, "targets_cpu", lambda: on_cpu)
    monkeypatch.setattr(materialization, "_engine", engine)
    materialization.run_offline()
    (cold, _), *more = started
    assert cold.engine == EngineTask()
    if on_cpu:
        assert more == []
        return
    ((warm, arguments),) = more
    notes = warm.engine.kv_note
    assert arguments[1:] == ("size",) and notes is not None and notes.is_dir()
    assert warm == replace(cold, engine=EngineTask(kv_note=notes))


def test_graphs_that_fail_in_the_proof_start_are_left_out_and_the_rest_is_proved(
    materialization: Assembly, monkeypatch: pytest.MonkeyPatch
) -> None:
    (materialization.out / "graphs").mkdir()
    starts: list[bool] = []

    def start() -> dict[str, Any]:
        starts.append((materialization.out / "graphs").is_dir())
        if starts[-1]:
            raise CommandFailedError(
                "The start that checks the new bundle used fallbacks: graphs: FULL:num_tokens=8: no memory"
            )
        return {"ready_s": 1.0}

    monkeypatch.setattr(materialization, "_run_test_start", start)
    materialization.verify_by_start()
    assert starts == [True, False]
    stages = json.loads((materialization.out / "stages.json").read_text())
    assert "FULL:num_tokens=8: no memory" in stages["not_made"]["graphs"] and stages["ready_s"] == 1.0


@pytest.mark.parametrize("with_graphs_s", [1.9, 2.0])
def test_graphs_are_dropped_unless_a_start_is_shorter_with_them(
    materialization: Assembly, monkeypatch: pytest.MonkeyPatch, with_graphs_s: float
) -> None:
    """Both starts have the same KV cache size."""
    section = materialization.out / "graphs"
    section.mkdir()
    (materialization.out / "modelinfo.json").write_text("{}")
    (materialization.out / "kv.json").write_text('{"bytes": 4096}')
    sizes: list[str] = []

    def start(plan: LaunchPlan, output: Any) -> tuple[Any, None]:
        sizes.append(plan.vllm_args.get_value("kv_cache_memory_bytes"))
        for name in ("proof", "offline"):
            materialization.locate_events(name).touch()
        return PROCESS, None

    def await_readiness(*_: object) -> Any:
        seconds = with_graphs_s if section.is_dir() else 2.05
        return SimpleNamespace(report={"fast_path": {"graphs": True}, "fallbacks": []}, ready_s=seconds)

    monkeypatch.setattr(assembly.server_process, "start_fresh", start)
    monkeypatch.setattr(assembly.server_process, "await_readiness", await_readiness)
    materialization.verify_by_start()
    materialization.drop_slow_graphs()
    assert len(sizes) == 3 and len(set(sizes)) == 1
    stages = json.loads((materialization.out / "stages.json").read_text())
    if section.is_dir():
        assert with_graphs_s == 1.9 and "not_made" not in stages
    else:
        assert stages["not_made"] == {"graphs": "a start took 2.0 s with them and 2.0 s without"}


def test_code_at_fault_is_omitted_alone(materialization: Assembly, monkeypatch: pytest.MonkeyPatch) -> None:
    for section in ("graphs", "compile"):
        (materialization.out / section).mkdir()

    def start() -> dict[str, Any]:
        present = [name for name in ("compile", "graphs") if (materialization.out / name).is_dir()]
        report = {
            "fast_path": {"compile": False, "graphs": True},
            "fallbacks": [{"section": "compile", "reason": "rank_0_0: vLLM rejected the artifact"}],
        }
        require_fast_path(report, present, canary=False)
        return {"ready_s": 1.0}

    monkeypatch.setattr(materialization, "_run_test_start", start)
    materialization.verify_by_start()
    assert (materialization.out / "graphs").is_dir()
    (left_out,) = json.loads((materialization.out / "stages.json").read_text())["not_made"].items()
    assert left_out[0] == "compile" and "rejected the artifact" in left_out[1]


def test_the_error_of_a_proof_start_names_the_unused_sections(
    materialization: Assembly, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log's end is added to the error, which still names the sections."""
    (materialization.out / "modelinfo.json").write_text("{}")
    (materialization.out / "compile").mkdir()
    running = SimpleNamespace(report={"fast_path": {}, "fallbacks": []}, ready_s=1.0)
    monkeypatch.setattr(assembly.server_process, "await_readiness", lambda *_: running)
    with pytest.raises(VerificationFailedError, match="the end of its log") as caught:
        materialization._run_test_start()
    assert caught.value.unused == ["compile"]


def test_the_proof_start_of_a_gpu_gets_the_descriptions_of_the_model_classes(
    materialization: Assembly, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without them vLLM inspects the class in a process of its own, which takes 10 s."""
    monkeypatch.setattr(runtime, "targets_cpu", lambda: False)
    (materialization.out / "compile").mkdir()
    (materialization.out / "modelinfo.json").write_text(json.dumps({"vllm_modelinfos": {"a.json": "{}"}}))
    root = Path(materialization._plan_test_start(tmp_path / "socket").env["VLLM_CACHE_ROOT"])
    assert (root / "modelinfos" / "a.json").read_text() == "{}"


@pytest.mark.parametrize("by_process", [True, False])
@pytest.mark.parametrize("on_cpu", [False, True])
def test_the_proof_start_records_its_peak_on_the_devices(
    materialization: Assembly, monkeypatch: pytest.MonkeyPatch, fake: Fake, on_cpu: bool, by_process: bool
) -> None:
    """Where the driver does not know the memory of processes, what became less on the device is the figure."""
    for _ in range(2):
        fake.add(free=100)
    (materialization.out / "modelinfo.json").write_text("{}")
    sizing = {
        "ranks": [{"weights_bytes": GIB, "kv_floor_bytes": size * GIB} for size in (1, 3)],
        "plans": [{"kv_cache_memory_bytes": size * GIB} for size in (4, 5)],
    }
    (materialization.out / "kv.json").write_text(json.dumps(sizing))
    looked, look = threading.Event(), nvml.PeakMemory._sample

    def note(peak: nvml.PeakMemory) -> None:
        look(peak)
        looked.set()

    def become_ready(*_: object) -> Any:
        for held in (9, 5):  # a peak that is gone when the server is ready
            for device, size in enumerate((held, 1)):
                fake.run(device, os.getpid(), size * GIB if by_process else None)
                fake.free(device, 100 - size)
            looked.clear()
            assert looked.wait(30)
            looked.clear()  # the look may have begun before this change
            assert looked.wait(30)
        return SimpleNamespace(report={"fast_path": {}, "fallbacks": []}, ready_s=1.0)

    monkeypatch.setattr(nvml.PeakMemory, "INTERVAL_S", 0.01)
    monkeypatch.setattr(nvml.PeakMemory, "_sample", note)
    monkeypatch.setattr(runtime, "targets_cpu", lambda: on_cpu)
    monkeypatch.setattr(assembly.server_process, "await_readiness", become_ready)
    monkeypatch.setattr(assembly.Timeline, "read", lambda _: assembly.Timeline())
    stages = materialization._run_test_start()
    assert stages["device_bytes"] == (None if on_cpu else 10 * GIB) and stages["memory_bytes"] > 0
    if not on_cpu:  # the second GPU can have 2 GiB less, so each of them can
        needs = [stages[f"{name}_bytes"] for name in ("weights", "kv_floor", "device_floor")]
        assert needs == [2 * GIB, 4 * GIB, 6 * GIB + 2 * assembly._ROUNDING]
        (materialization.out / "kv.json").write_text(json.dumps(sizing | {"plans": []}))
        assert "device_floor_bytes" not in materialization._count_needs(9 * GIB), "the user has set the size"


class _Sleeper(Handler):
    """Server that sleeps and reports its process. `device` is the fake NVML library."""

    device: Fake
    reports: list[Any]

    def do_POST(self) -> None:
        method = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        gib = {"/sleep?level=1": 2, '{"method": "checkpoint_prepare"}': 0}.get(method or self.path)
        if gib is not None:
            self.device.run(0, os.getpid(), gib * GIB)
        results = self.reports if WORKER_REPORT in method else [None]
        self.reply(json.dumps({"results": results}), "application/json")


@pytest.mark.parametrize("missing", ["", "parked_bytes", "asleep_bytes"])
def test_the_proof_start_of_a_gpu_records_what_a_sleeping_server_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: Fake, checkpoints: Path, missing: str
) -> None:
    fake.add(free=100)
    _Sleeper.device, _Sleeper.reports = fake, [{"pid": os.getpid()} if not missing else None]
    (checkpoints / str(os.getpid())).write_text("0")
    arguments = Arguments(("--enable-sleep-mode",))
    made = Assembly(ResolvedModel("m", tmp_path, None, None, {}), arguments, "sha256:00", tmp_path, _phase)
    for name in ("modelinfo", "kv"):
        (made.out / f"{name}.json").write_text("{}")
    modes, servers = [], list[socketserver.UnixStreamServer]()

    def start(plan: LaunchPlan, output: Any) -> tuple[Any, None]:
        modes.append(plan.env[VLLM_SERVER_DEV_MODE])
        if missing != "asleep_bytes":
            servers.append(socketserver.UnixStreamServer(str(plan.vllm_args.get_value("uds")), _Sleeper))
            threading.Thread(target=servers[0].serve_forever, daemon=True).start()
        fake.run(0, os.getpid(), 9 * GIB)
        return SimpleNamespace(pid=os.getpid(), signal=lambda number: None, wait=lambda: 0), None

    ready = SimpleNamespace(report={"fast_path": {}, "fallbacks": []}, ready_s=1.0)
    monkeypatch.setattr(runtime, "targets_cpu", lambda: False)
    monkeypatch.setattr(assembly.server_process, "start_fresh", start)
    monkeypatch.setattr(assembly.server_process, "await_readiness", lambda *_: ready)
    monkeypatch.setattr(assembly.Timeline, "read", lambda _: assembly.Timeline())
    made.verify_by_start()
    stages, expected = json.loads((made.out / "stages.json").read_text()), {"asleep_bytes": 2 * GIB}
    if not missing:
        assert (checkpoints / str(os.getpid())).read_text() == "0", "the server continues and ends"
        expected["parked_bytes"] = 0
    assert stages["device_bytes"] == 9 * GIB and modes == ["1"]
    found = {name: size for name, size in stages.items() if name in ("asleep_bytes", "parked_bytes")}
    assert found == (expected if missing != "asleep_bytes" else {})
    assert list(stages.get("not_made", {})) == ([missing] if missing else [])
    for server in servers:
        server.shutdown()
        server.server_close()


def test_bundle_says_why_it_lacks_one(materialization: Assembly, monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(module: str, plan: LaunchPlan, *arguments: str) -> None:
        (materialization.out / "not_made.json").write_text('{"compile": "PicklingError"}')

    monkeypatch.setattr(runtime, "targets_cpu", lambda: True)
    monkeypatch.setattr(materialization, "_engine", engine)
    monkeypatch.setattr(materialization, "_run_test_start", lambda: {"ready_s": 1.0})
    materialization.run_offline()
    materialization.verify_by_start()
    assert json.loads((materialization.out / "stages.json").read_text())["not_made"] == {
        "compile": "PicklingError"
    }


def test_failed_proof_publishes_nothing(materialization: Assembly, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Mock(side_effect=CommandFailedError("another token"))
    monkeypatch.setattr(materialization, "_run_test_start", start)
    with pytest.raises(CommandFailedError, match="another token"):
        materialization.verify_by_start()


def test_temporary_files_of_the_engine_are_removed(
    materialization: Assembly, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM creates a rendezvous file there and does not remove it."""
    monkeypatch.setenv("TMPDIR", str(home))
    monkeypatch.setattr(tempfile, "tempdir", str(home))

    def spawn(module: str, plan: LaunchPlan, *_: object, env: dict[str, str], **__: object) -> Any:
        program = "import tempfile; print(tempfile.mkstemp(prefix='vllm_dist_')[1])"
        log = (materialization.work / "offline.log").open("wb")
        reader, writer = os.pipe()
        with os.fdopen(writer, "w") as report:
            report.write("{}\n")
        return subprocess.Popen([sys.executable, "-c", program], stdout=log, env=env), reader

    monkeypatch.setattr(assembly.server_process, "spawn_engine_module", spawn)
    materialization._engine("offline", LaunchPlan(Arguments()))
    left = Path((materialization.work / "offline.log").read_text().strip())
    assert home in left.parents and not left.exists() and not list(home.rglob("vllm_dist_*"))


def test_snapshot_directory_stays_in_use(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache.at(tmp_path / "cache")
    store = Store(cache.bundles)
    bundle = bundles.publish(store, tmp_path / "scratch")

    def frozen(plan: LaunchPlan, images: Path, timeout_s: float) -> None:
        (images / "pages-1.img").write_bytes(b"pages")
        (images / fingerprint.MODULES).write_text("[]")
        fingerprint.write_fingerprint(os.getpid(), images / fingerprint.MODULES, images)
        with create_workspace(cache.unfinished_materializations):
            assert (images / "pages-1.img").read_bytes() == b"pages"

    monkeypatch.setattr(materialize.process_snapshot, "freeze_template", frozen)
    monkeypatch.setattr(materialize.fetch, "choose_weights_source", lambda _: None)
    monkeypatch.setattr(materialize.prepare, "plan_with_bundle", lambda *_, **__: LaunchPlan(Arguments()))
    lookup: Any = SimpleNamespace(store=store, cache=cache)
    assert not materialize.has_snapshot(lookup, bundle)

    materialize.add_snapshot(lookup, bundle, no_progress)

    assert materialize.has_snapshot(lookup, bundle) and store.list_bundles() == [bundle]
    image = runtime_image.choose_engine_image_directory(cache.runtimes, bundle.digest)
    assert runtime_image.explain_unreadable(image) is None and image.stat().st_mode & 0o077 == 0
    assert {file.stat().st_mode & 0o777 for file in image.iterdir()} == {0o600}
    with monkeypatch.context() as updated:
        updated.setattr(fingerprint, "read_machine_properties", lambda: {"kernel": "newer"})
        assert not materialize.has_snapshot(lookup, bundle)  # it is created again
    assert [left for left in cache.unfinished_materializations.iterdir() if left.is_dir()] == []
    assert pruning.prune(cache, [bundle.name]).frozen == (image,)
    assert not materialize.has_snapshot(lookup, bundle)


WRITER = """
import sys, time
from pathlib import Path
caches, over = Path(sys.argv[1]) / "caches", time.monotonic() + 1.5
print("up", flush=True)
while time.monotonic() < over:
    try:
        (caches / str(time.monotonic_ns())).touch()
    except FileNotFoundError:
        break
"""


def test_workspace_is_removed_while_a_child_still_writes(tmp_path: Path) -> None:
    root = tmp_path / "work"
    with create_workspace(root) as own:
        (own / "caches").mkdir()
        for number in range(5000):  # so that something is written while these are removed
            (own / "caches" / str(number)).touch()
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(own)], stdout=subprocess.PIPE)
        assert writer.stdout is not None and writer.stdout.readline() == b"up\n"
    assert not own.exists()
    writer.communicate()
    with create_workspace(root):
        pass
    assert [left for left in root.iterdir() if left.is_dir()] == []


@pytest.fixture
def lookup(model: ResolvedModel, home: Path, monkeypatch: pytest.MonkeyPatch) -> BundleLookup:
    """Look up a model whose engine run writes the section `kv` and whose proof does nothing."""

    def run_offline(self: Assembly) -> None:
        (self.out / "modelinfo.json").write_text("{}")
        (self.out / "kv.json").write_text('{"bytes": 1}')

    monkeypatch.setattr(Assembly, "run_offline", run_offline)
    monkeypatch.setattr(Assembly, "verify_by_start", lambda self: None)
    return BundleLookup(model, Arguments(), Cache(home / "cache"), key(seed=1))


def test_first_start_uses_hashes_of_materialize(
    lookup: BundleLookup, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = MaterializationPlan(lookup, Options()).run()
    monkeypatch.setattr(weights, "build_plan", lambda *_: pytest.fail("hashed again"))
    assert lookup.model.path is not None
    found = weights.read_or_compute_digest(lookup.model.path, lookup.cache.weights)
    assert found == made.read_json("modelinfo")["weights"]


def test_a_gpu_build_without_a_gpu_is_refused_before_the_engine_starts(
    lookup: BundleLookup, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Assembly, "run_offline", lambda self: pytest.fail("started an engine"))
    monkeypatch.setattr(runtime, "find_vllm_distribution", lambda: ("vllm", "0.32.0"))
    monkeypatch.setattr(runtime, "targets_cpu", lambda: False)
    with pytest.raises(CommandFailedError, match="no GPU responds") as caught:
        MaterializationPlan(lookup, Options()).run()
    assert "--gpus all" in str(caught.value.hint)
