"""The section in a real store: trusted or not, prepared for a start, used by an engine elsewhere, validated."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from coldstart.artifacts import sign
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.store import Store
from support.graphs_worker import Rounds
from support.graphs_worker import start as start_worker
from tools.bundles import key, provenance

from coldstart.contract.arguments import Arguments
from coldstart.contract.graphs import EngineTask
from coldstart.errors import CommandFailedError
from coldstart.launch import prepare
from coldstart.launch.fetch import Weights
from coldstart.materialize import graphs
from coldstart.models import inspection
from coldstart.models.inspection import Lookup
from coldstart.models.resolution import ResolvedModel
from coldstart.system import paths
from coldstart.system.devices import nvml
from coldstart.system.paths import Cache
from coldstart.validate import start
from coldstart.validate.checks import Finding, Level
from coldstart.validate.launchers import ModelUnderTest
from coldstart.validate.responses import ServerResponses

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
    with Store(place / "store").open_draft(key()) as draft:
        draft.add_tree("graphs", section)
        draft.add_json("kv", {"bytes": 1 << 20} | kv)
        return draft.publish(provenance(), signer=sign.load_host_key(paths.state_dir()) if signed else None)


def prepared(bundle: Bundle, place: Path) -> Any:
    model = ResolvedModel("tiny", None, "org/tiny", None, {})
    lookup = Lookup(model, Arguments(), Cache(place / "cache"), bundle.key, bundle)
    return prepare.plan_with_bundle(
        lookup, bundle, Weights(lookup.model, Arguments()), trust=inspection.trust
    )


def test_from_the_store_to_an_engine_with_other_addresses(
    place: Path, rounds_bundle: Path, here: dict[str, Any]
) -> None:
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
@pytest.mark.parametrize(
    ("free", "used"),
    [([9, 2000], False), ([1000, 1000], True), ([None, None], True), ([999, 1000], True), ([1000, 9], False)],
)
def test_a_gpu_sizes_its_kv_cache_through_a_plan_for_each_rank(
    place: Path, rounds_bundle: Path, monkeypatch: pytest.MonkeyPatch, free: list[int | None], used: bool
) -> None:
    monkeypatch.setattr(nvml, "read_free_bytes", free.__getitem__)
    monkeypatch.setattr(
        prepare, "read_available_memory", lambda: pytest.fail("the host's memory was requested")
    )
    plan = prepared(publish(place, rounds_bundle, plans=[PLAN, PLAN | {"rank": 1}]), place)
    assert (plan.engine.kv_plan is not None) is used
    assert ("kv" in [f.stage for f in plan.fallbacks]) is not used
    assert "--kv-cache-memory-bytes" not in plan.vllm_args


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    "plans", [None, {}, [], [{"rank": 1}], [PLAN | {"kv_cache_memory_bytes": "700"}], [PLAN, PLAN]]
)
def test_invalid_plan_is_reported(place: Path, rounds_bundle: Path, plans: object) -> None:
    made = prepared(publish(place, rounds_bundle, plans=plans), place)
    assert made.engine.kv_plan is None and "kv" in [f.stage for f in made.fallbacks]


# --- materialize ---


def test_cpu_engine_has_no_graphs(tmp_path: Path) -> None:
    reason = graphs.build_section(
        tmp_path / "out", tmp_path / "work", lambda *_: pytest.fail("started"), Arguments()
    )
    assert "runs on the CPU" in str(reason) and not (tmp_path / "out").exists()


@pytest.mark.usefixtures("on_gpu")
def test_materialize_makes_the_section_and_a_failed_engine_only_omits_it(
    tmp_path: Path, here: dict[str, Any]
) -> None:
    assert graphs.build_section(tmp_path / "out", tmp_path / "work", Rounds(here), Arguments()) is None
    assert (tmp_path / "out" / "proof.json").exists()

    def fail(name: str, task: EngineTask) -> None:
        raise CommandFailedError("the engine ended with exit code 1")

    reason = graphs.build_section(tmp_path / "none", tmp_path / "again", fail, Arguments())
    assert "exit code 1" in str(reason) and not (tmp_path / "none").exists()


def test_recording_engines_have_one_kv_size() -> None:
    assert graphs.kv_cache_arguments({"bytes": 7}, Arguments()) == ["--kv-cache-memory-bytes", "7"]
    assert graphs.kv_cache_arguments({"bytes": 7, "plans": [PLAN]}, Arguments()) == [
        "--kv-cache-memory-bytes",
        "700",
    ]
    assert graphs.kv_cache_arguments({"bytes": 7}, Arguments(["--kv-cache-memory-bytes", "9"])) == []


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
    bundle = publish(place, rounds_bundle)
    (finding,) = validate(bundle, "replay")
    assert (finding.code, finding.severity) == ("CS-GRAPHS-NOT-REPLAYED", "warning")
    assert "cannot replay the CUDA graphs" in finding.message and finding.hint.startswith(
        "run on a machine with a GPU"
    )
    assert validate(bundle, "load") == []
    monkeypatch.setattr(nvml, "list_gpus", lambda: ["a device"])
    found = validate(bundle, "replay", ("graphs", "all: another driver"), ("kv", "too little memory"))
    kinds = [(f.code, f.severity) for f in found]
    assert kinds == [("CS-GRAPHS-REPLAY", "error"), ("CS-FALLBACK", "warning")]


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
