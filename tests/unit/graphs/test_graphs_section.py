"""The section in a real store: trusted or not, prepared for a start, used by an engine elsewhere, validated."""

import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from coldstart.artifacts import sign
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.store import Store
from support.graphs_worker import KEYS, Change, Rounds
from support.graphs_worker import start as start_worker
from tools.bundles import publish_sections

from coldstart.contract.arguments import Arguments
from coldstart.contract.graphs import EngineTask
from coldstart.errors import CommandFailedError
from coldstart.graphs import offline, tables
from coldstart.graphs.errors import GraphRefusedError, NotProvenError
from coldstart.graphs.prove import read_proof
from coldstart.launch import prepare
from coldstart.launch.fetch import ServerWeights
from coldstart.materialize import assembly
from coldstart.models import inspection
from coldstart.models.inspection import NOT_MADE, BundleLookup
from coldstart.models.resolution import ResolvedModel
from coldstart.system import paths
from coldstart.system.devices import nvml
from coldstart.system.paths import Cache
from coldstart.validate import start
from coldstart.validate.checks import Finding, Level
from coldstart.validate.launchers import ModelUnderTest
from coldstart.validate.responses import ServerResponses
from tests.support.graphs.model import SimModel

PLAN = {"rank": 0, "kv_cache_memory_bytes": 700, "free_memory_baseline": 1000, "vllm": "0.32", "device": "H"}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("CACHE", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    monkeypatch.delenv("COLDSTART_CACHE_DIR", raising=False)
    return tmp_path


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coldstart.system.runtime.targets_cpu", lambda: False)


def publish(place: Path, section: Path, *, signed: bool = True, **kv: Any) -> Bundle:
    signer = sign.load_host_key(paths.state_dir()) if signed else None
    return publish_sections(Store(place / "store"), signer=signer, graphs=section, kv={"bytes": 1 << 20} | kv)


def prepared(bundle: Bundle, place: Path, *words: str) -> Any:
    model = ResolvedModel("tiny", None, "org/tiny", None, {})
    lookup = BundleLookup(model, Arguments(), Cache(place / "cache"), bundle.key, bundle)
    weights = ServerWeights(lookup.model, Arguments(words))
    return prepare.plan_with_bundle(lookup, bundle, weights, trust=inspection.trust)


def test_store_to_engine_with_other_addresses(place: Path, rounds_bundle: Path, here: dict[str, Any]) -> None:
    bundle = publish(place, rounds_bundle)
    plan = prepared(bundle, place)
    assert not [f for f in plan.fallbacks if f.stage == "graphs"]
    session, runner = start_worker(here, plan.engine.restore)
    assert session.fallbacks == {} and runner.cudagraph_manager.captured == []


def test_untrusted_graphs_are_not_unpacked(place: Path, rounds_bundle: Path) -> None:
    plan = prepared(publish(place, rounds_bundle, signed=False), place)
    assert plan.engine == EngineTask()
    (reason,) = [f.reason for f in plan.fallbacks if f.stage == "graphs"]
    assert "not trusted" in reason


@pytest.mark.usefixtures("on_gpu")
def test_a_gpu_sizes_its_kv_cache_through_a_plan_for_each_rank(
    place: Path, rounds_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory is requested before the start: a standby engine has its KV, while another engine uses the rest of the GPU."""
    for module, name in ((nvml, "read_gpu_state"), (prepare, "read_available_memory")):
        monkeypatch.setattr(module, name, lambda: pytest.fail("free memory was requested"))
    bundle = publish(place, rounds_bundle, plans=[PLAN, PLAN | {"rank": 1}])
    plan = prepared(bundle, place)
    assert plan.engine.kv_plan == [PLAN, PLAN | {"rank": 1}]
    assert "kv" not in [f.stage for f in plan.fallbacks]
    assert "--kv-cache-memory-bytes" not in plan.vllm_args
    # A server that may use half of the GPU less has that much less KV, whatever other processes hold of the rest.
    monkeypatch.setattr(nvml, "list_gpus", lambda: [nvml.Gpu("H", None, "9.0", 1000, "580")])
    cut = PLAN | {"kv_cache_memory_bytes": 200, "free_memory_baseline": 420}
    limited = prepared(bundle, place, "--gpu-memory-utilization", "0.42")
    assert limited.engine.kv_plan == [cut, cut | {"rank": 1}]


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    "plans", [None, {}, [], [{"rank": 1}], [PLAN | {"kv_cache_memory_bytes": "700"}], [PLAN, PLAN]]
)
def test_invalid_plan_is_reported(place: Path, rounds_bundle: Path, plans: object) -> None:
    made = prepared(publish(place, rounds_bundle, plans=plans), place)
    assert made.engine.kv_plan is None and "kv" in [f.stage for f in made.fallbacks]


# --- materialize ---


def test_cpu_engine_has_no_graphs(tmp_path: Path) -> None:
    reason = assembly.build_graphs_section(
        tmp_path / "out", tmp_path / "work", lambda *_: pytest.fail("started"), Arguments()
    )
    assert "runs on the CPU" in str(reason) and not (tmp_path / "out").exists()


@pytest.mark.usefixtures("on_gpu")
def test_materialize_makes_the_section_or_omits_it(tmp_path: Path, here: dict[str, Any]) -> None:
    assert (
        assembly.build_graphs_section(tmp_path / "out", tmp_path / "work", Rounds(here), Arguments()) is None
    )
    assert (tmp_path / "out" / "proof.json").exists()
    fail = Mock(side_effect=CommandFailedError("the engine ended with exit code 1"))
    reason = assembly.build_graphs_section(tmp_path / "none", tmp_path / "again", fail, Arguments())
    assert "exit code 1" in str(reason) and not (tmp_path / "none").exists()


def test_recording_engines_have_one_kv_size() -> None:
    assert assembly.choose_kv_cache_arguments({"bytes": 7}, Arguments()) == ["--kv-cache-memory-bytes", "7"]
    assert assembly.choose_kv_cache_arguments({"bytes": 7, "plans": [PLAN]}, Arguments()) == [
        "--kv-cache-memory-bytes",
        "700",
    ]
    assert assembly.choose_kv_cache_arguments({"bytes": 7}, Arguments(["--kv-cache-memory-bytes", "9"])) == []


# --- validate ---


Validate = Callable[..., list[Finding]]


@pytest.fixture
def validate(monkeypatch: pytest.MonkeyPatch) -> Validate:
    """Return validate(bundle, level, *fallbacks), which checks the bundle with servers that report these fallbacks."""

    def check(bundle: Bundle, level: Level, *fallbacks: tuple[str, str]) -> list[Finding]:
        def collect(*_: object) -> ServerResponses:
            listed = [{"section": section, "reason": reason} for section, reason in fallbacks]
            return ServerResponses({}, {"fast_path": {"graphs": not listed}, "fallbacks": listed})

        monkeypatch.setattr(start, "collect_responses", collect)
        return start.check_start(bundle, level, ModelUnderTest("m", "/m"))

    return check


def test_validation_requires_that_graphs_are_replayed_on_a_gpu(
    place: Path, rounds_bundle: Path, validate: Validate, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = {NOT_MADE: {"compile": "PicklingError"}}
    bundle = publish_sections(Store(place / "store"), graphs=rounds_bundle, stages=stages)
    (finding,) = validate(bundle, "replay")
    assert (finding.code, finding.severity) == ("CS-GRAPHS-NOT-REPLAYED", "warning")
    assert "cannot replay the CUDA graphs" in finding.message and finding.hint.startswith(
        "run on a machine with a GPU"
    )
    assert validate(bundle, "load") == []
    monkeypatch.setattr(nvml, "list_gpus", lambda: ["a device"])
    found = validate(bundle, "replay", ("graphs", "another driver"), ("compile", "no code"), ("kv", "full"))
    assert [(f.code, f.severity, "build the bundle with arguments" in f.hint) for f in found] == [
        ("CS-GRAPHS-REPLAY", "error", False),
        ("CS-FALLBACK", "warning", True),
        ("CS-FALLBACK", "warning", False),
    ]


@pytest.mark.parametrize(
    ("name", "code"), [("tables.npz", "CS-GRAPH-ALTERED"), ("proof.json", "CS-GRAPH-UNPROVEN")]
)
def test_altered_or_unproven_tables_are_errors(
    place: Path, rounds_bundle: Path, validate: Validate, name: str, code: str
) -> None:
    copy = Path(shutil.copytree(rounds_bundle, place / "copy"))
    (copy / name).write_bytes(b"{}")
    found = validate(publish(place, copy), "load")
    assert [f.code for f in found] == [code] and found[0].severity == "error"


Here = dict[str, SimModel]
STEPS = 3


def _spoil(work: Path) -> Callable[[str], None]:
    """Move one relocation of the smallest graph after the bundle was linked."""

    def between(name: str) -> None:
        bundle = work / offline.BUNDLE
        if name != "prove graphs":
            return
        found = tables.load(bundle)
        rows = found.graphs[KEYS[0]].relocations
        symbols = [found.regions[i].symbol for i in rows["region"].tolist()]
        rows["offset"][symbols.index("static:ids")] += 4
        tables.replace_tables(found, bundle)

    return between


def test_graph_that_fails_proof_is_dropped_and_the_proof_is_of_the_rest(here: Here, tmp_path: Path) -> None:
    directory = offline.run_offline_phase(tmp_path, Rounds(here, between=_spoil(tmp_path)))
    found = tables.load(directory)
    assert sorted(found.graphs) == sorted(KEYS[1:]) and "differ" in found.refused[KEYS[0]]
    assert read_proof(directory).proven == KEYS[1:]
    assert start_worker(here, directory)[1].cudagraph_manager.captured == [1]


@pytest.mark.parametrize(
    ("written", "reason"), [(None, "the engine recorded no graphs"), ("several ranks", None)]
)
def test_engine_without_output_is_reported(tmp_path: Path, written: str | None, reason: str | None) -> None:
    def launch(name: str, task: EngineTask) -> None:
        if written and task.record:
            offline.fail(task.record, written)

    with pytest.raises(GraphRefusedError, match=reason or written):
        offline.run_offline_phase(tmp_path, launch)


def test_layouts_in_which_every_graph_conflicts_are_no_bundle(rounds_bundle: Path, tmp_path: Path) -> None:
    """On an H100, all graphs of a model were refused for one reason, and the empty bundle counted as proven."""
    nothing = tables.load(rounds_bundle).drop_graphs(dict.fromkeys(KEYS, "a word points elsewhere"))

    def launch(name: str, task: EngineTask) -> None:
        assert task.record is not None, name
        (tmp_path / offline.FIRST).mkdir(exist_ok=True)
        tables.save(nothing, tmp_path / offline.BUNDLE, {})

    with pytest.raises(
        GraphRefusedError, match=rf"relocated: \S+ and {len(KEYS) - 1} more: a word points elsewhere$"
    ):
        offline.run_offline_phase(tmp_path, launch)


# --- contents that the engine rewrites between steps ---


def _moving(memory: str, at: int) -> Change:
    """Return a step that rewrites memory that no tensor names, the table or the semaphore, from one step to the next."""
    steps = count()

    def change(model: SimModel) -> None:
        if next(steps) % STEPS in (at, at + 1):
            address = model.rope_table if memory == "table" else model.hidden["semaphore"]
            (held,) = model.driver.read(address, 1)
            model.driver.write(address, bytes([held ^ 0x5A]))

    return change


@pytest.mark.parametrize("at", range(STEPS - 1))
def test_graphs_over_moving_memory_are_refused_alone(here: Here, tmp_path: Path, at: int) -> None:
    """Its contents are not stored, so the proof fails for the graphs that need them."""
    section = offline.run_offline_phase(tmp_path, Rounds(here, steps=STEPS, step=_moving("semaphore", at)))
    found = tables.load(section)
    assert sorted(found.graphs) == sorted(KEYS[1:]) and list(found.refused) == KEYS[:1]
    assert "restored and the captured graph have different outputs" in found.refused[KEYS[0]]
    with pytest.raises(NotProvenError, match="no graph could be verified"):
        offline.run_offline_phase(tmp_path / "all", Rounds(here, steps=STEPS, step=_moving("table", at)))


@pytest.mark.parametrize("steps", [0, 1])
def test_engine_without_observed_steps_proves_no_graph(here: Here, tmp_path: Path, steps: int) -> None:
    with pytest.raises(GraphRefusedError, match=f"{steps} steps after the capture, but at least 2"):
        offline.run_offline_phase(tmp_path, Rounds(here, steps=steps))
