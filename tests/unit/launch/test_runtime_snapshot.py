"""One image for every model: made or refused with the reason, and taken by the ladder where nothing better is."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from coldstart.artifacts.bundle import Bundle

from coldstart.contract.arguments import Arguments
from coldstart.contract.plan import LaunchPlan
from coldstart.errors import CommandFailedError
from coldstart.launch import ladder, prepare_template, process_snapshot, runtime_snapshot, template_pool
from coldstart.launch.request import ServeRequest
from coldstart.models import tiny
from coldstart.models.inspection import Lookup
from coldstart.models.resolution import ResolvedModel
from coldstart.system import runtime
from coldstart.system.paths import Cache
from coldstart.system.proc import processes
from coldstart.system.snapshot import criu

FakeEngine = Callable[[str], None]
PLAN = LaunchPlan(Arguments(["serves", "--port", "7"]))


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch, home: Path, tmp_path: Path) -> list[LaunchPlan]:
    """Freezing writes one file and keeps the plan that it was asked with."""
    plans: list[LaunchPlan] = []

    def freeze(plan: LaunchPlan, out: Path, timeout: float, level: str = "engine") -> None:
        assert level == "runtime"
        plans.append(plan)
        (out / "pages-1.img").write_bytes(b"x")

    monkeypatch.setattr(criu, "missing", lambda: None)
    monkeypatch.setattr(tiny, "build", lambda name, models: tmp_path / name)
    monkeypatch.setattr(process_snapshot, "freeze", freeze)
    return plans


def test_what_is_frozen_knows_no_model_of_anybodys(made_up: list[LaunchPlan], tmp_path: Path) -> None:
    cache = Cache.at()
    assert runtime_snapshot.made(cache) is None
    image = runtime_snapshot.freeze(cache, 9)
    assert runtime_snapshot.made(cache) == image and image.parent == cache.runtimes
    (plan,) = made_up
    assert list(plan.vllm_args) == ["--model", str(tmp_path / "tiny-llama")]
    assert (plan.key, plan.weights, plan.compile_dir, plan.canary) == ("", "", None, None)


def test_without_criu_it_is_said_at_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(criu.VARIABLE, "/nonexistent/criu")
    with pytest.raises(CommandFailedError, match="/nonexistent/criu is not to be found") as said:
        runtime_snapshot.freeze(Cache.at(), 9)
    assert said.value.hint == "coldstart doctor" and not Cache.at().runtimes.exists()


def test_on_a_gpu_there_is_another_way(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "targets_cpu", lambda: False)
    with pytest.raises(CommandFailedError, match="cannot be frozen here") as said:
        prepare_template.freeze_runtime(Cache.at(), 9)
    assert "--level runtime" in str(said.value.hint)


def test_a_full_disk_is_named_and_leaves_nothing(
    made_up: list[LaunchPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(process_snapshot, "freeze", full)
    with pytest.raises(CommandFailedError, match="No space left on device"):
        runtime_snapshot.freeze(Cache.at(), 9)
    assert [path.name for path in Cache.at().runtimes.iterdir()] == [".lock"]


# The ladder.


@pytest.fixture
def found(publish: Callable[..., Bundle], model: ResolvedModel) -> Lookup:
    bundle = publish(kv={"bytes": 1})
    return Lookup(model, Arguments(), Cache.at(), bundle.key, bundle)


@pytest.fixture
def start(found: Lookup, fake_engine: FakeEngine) -> Iterator[Callable[..., ladder.StartedServer]]:
    """start(mode): a start with fakes, ended afterwards."""
    fake_engine("serves")
    made: list[ladder.StartedServer] = []

    def begin(mode: str) -> ladder.StartedServer:
        made.append(ladder.start(ServeRequest(found, mode=mode, ready_timeout=20), PLAN))
        return made[-1]

    yield begin
    for one in made:
        one.running.process.signal(9)
        one.running.process.wait()


class Thawed:
    """Takes process_snapshot.Thawed's place: a running template that ends with its server."""

    def __init__(self, socket: Path, process: subprocess.Popen[bytes]) -> None:
        self.socket, self.process, self.pid, self.ends = socket, process, process.pid, 0

    def end(self) -> None:
        self.ends += 1
        self.process.kill()
        self.process.wait()


@pytest.fixture
def thawed(
    start: object, made_up: list[LaunchPlan], home: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Thawed]:
    """The runtime is frozen, and thawing it gives a template; only CRIU and its namespaces are made up."""
    runtime_snapshot.freeze(Cache.at(), 9)
    process = template_pool.spawn(
        "runtime", replace(PLAN, key="another"), home / "thawed", subprocess.DEVNULL, 20
    )
    made = Thawed(home / "thawed", process)
    monkeypatch.setattr(process_snapshot, "restored", lambda image, plan: made)
    monkeypatch.setattr(processes, "outer_pid", lambda _, pid: pid)
    yield made
    made.end()


@pytest.mark.parametrize("mode", ["auto", "runtime-snapshot"])
def test_it_starts_a_model_that_it_was_not_made_with(
    start: Callable[..., ladder.StartedServer], thawed: Thawed, mode: str
) -> None:
    document = start(mode).document()
    assert document["mode"] == "runtime-snapshot" and document["fast_path"]["mode"]
    assert [step["section"] for step in document["fallbacks"]] == []


def test_fresh_by_name_is_the_ordinary_start(
    start: Callable[..., ladder.StartedServer], thawed: Thawed
) -> None:
    assert start("fresh").mode == "fresh"


def test_where_none_is_made_it_is_named_and_fresh(
    start: Callable[..., ladder.StartedServer], home: Path
) -> None:
    document = start("runtime-snapshot").document()
    assert document["mode"] == "fresh" and document["fallbacks"][0]["section"] == "runtime-snapshot"
    assert document["fallbacks"][0]["hint"] == "coldstart template freeze"


def test_an_image_that_was_changed_is_named_and_fresh(
    start: Callable[..., ladder.StartedServer], thawed: Thawed
) -> None:
    (image,) = (path for path in Cache.at().runtimes.iterdir() if path.is_dir())
    (image / "pages-1.img").write_bytes(b"other")
    document = start("auto").document()
    assert document["mode"] == "fresh" and not document["fast_path"]["mode"]
    assert "pages-1.img has changed since it was made" in document["fallbacks"][0]["reason"]


def test_a_refusal_of_the_thawed_one_is_named_and_fresh(
    start: Callable[..., ladder.StartedServer], thawed: Thawed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(image: Path, plan: LaunchPlan) -> Thawed:
        raise process_snapshot.SnapshotUnusableError("the snapshot was made with /a.py (sha256 0), found 1")

    monkeypatch.setattr(process_snapshot, "restored", refuses)
    document = start("runtime-snapshot").document()
    assert document["mode"] == "fresh" and "/a.py" in document["fallbacks"][0]["reason"]
