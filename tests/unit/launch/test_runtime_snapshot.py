"""One runtime image for every model: it is created or refused with a reason, and used when no better mode fits."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.engines import FakeThawed

from coldstart.contract.arguments import Arguments
from coldstart.contract.plan import LaunchPlan
from coldstart.errors import CommandFailedError, LaunchRefusedError
from coldstart.launch import process_snapshot, template_pool
from coldstart.launch.server import Server
from coldstart.models import tiny
from coldstart.system.paths import Cache
from coldstart.system.proc import processes
from coldstart.system.snapshot import criu

PLAN = LaunchPlan(Arguments(["serves", "--port", "7"]))


@pytest.fixture
def frozen_plans(monkeypatch: pytest.MonkeyPatch, home: Path, tmp_path: Path) -> list[LaunchPlan]:
    """Replace freezing by writing one file; return the received plans."""
    plans: list[LaunchPlan] = []

    def freeze(plan: LaunchPlan, out: Path, timeout: float, level: str = "engine") -> None:
        assert level == "runtime"
        plans.append(plan)
        (out / "pages-1.img").write_bytes(b"x")

    monkeypatch.setattr(criu, "explain_unavailable", lambda: None)
    monkeypatch.setattr(tiny, "build", lambda name, models: tmp_path / name)
    monkeypatch.setattr(process_snapshot, "freeze", freeze)
    return plans


def test_frozen_plan_contains_no_model_of_the_user(frozen_plans: list[LaunchPlan], tmp_path: Path) -> None:
    cache = Cache.at()
    assert process_snapshot.find_runtime(cache) is None
    image = process_snapshot.freeze_runtime(cache, 9)
    assert process_snapshot.find_runtime(cache) == image and image.parent == cache.runtimes
    (plan,) = frozen_plans
    assert list(plan.vllm_args) == ["--model", str(tmp_path / "tiny-llama")]
    assert (plan.key, plan.weights, plan.compile_dir, plan.canary) == ("", "", None, None)


def test_freeze_reports_a_full_disk_and_leaves_no_file(
    frozen_plans: list[LaunchPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(process_snapshot, "freeze", full)
    with pytest.raises(CommandFailedError, match="No space left on device"):
        process_snapshot.freeze_runtime(Cache.at(), 9)
    assert [path.name for path in Cache.at().runtimes.iterdir()] == [".lock"]


# The ladder.


@pytest.fixture
def start(start_server: Callable[..., Server]) -> Callable[..., Server]:
    """Return start(mode), which starts a fake server that is stopped afterwards."""
    return lambda mode: start_server(PLAN, mode)


@pytest.fixture
def thawed(
    start: object, frozen_plans: list[LaunchPlan], home: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeThawed]:
    """Freeze the runtime; thawing returns a template. Only CRIU and its namespaces are fakes."""
    process_snapshot.freeze_runtime(Cache.at(), 9)
    process = template_pool.spawn(
        "runtime", replace(PLAN, key="another"), home / "thawed", subprocess.DEVNULL, 20
    )
    made = FakeThawed(home / "thawed", process)
    monkeypatch.setattr(process_snapshot, "restore_template", lambda image, plan: made)
    monkeypatch.setattr(processes, "find_outer_pid", lambda _, pid: pid)
    yield made
    made.end()


@pytest.mark.parametrize("mode", ["auto", "runtime-snapshot"])
def test_image_starts_another_model(start: Callable[..., Server], thawed: FakeThawed, mode: str) -> None:
    document = start(mode).document()
    assert document["mode"] == "runtime-snapshot" and document["fast_path"]["mode"]
    assert [step["section"] for step in document["fallbacks"]] == []


def test_start_is_fresh_with_a_reason_when_the_thawed_template_refuses(
    start: Callable[..., Server], thawed: FakeThawed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(image: Path, plan: LaunchPlan) -> FakeThawed:
        raise LaunchRefusedError("the snapshot was made with /a.py (sha256 0), found 1")

    monkeypatch.setattr(process_snapshot, "restore_template", refuses)
    document = start("runtime-snapshot").document()
    assert document["mode"] == "fresh" and "/a.py" in document["fallbacks"][0]["reason"]
