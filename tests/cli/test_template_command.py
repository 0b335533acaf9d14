"""coldstart template: create, list and remove a frozen runtime, or report why this is impossible."""

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.range_server import run_server
from support.recorded_models import publish_recorded
from tools import tiny_models
from tools.command_line import Run, main

from coldstart.contract.plan import LaunchPlan
from coldstart.launch import preparation
from coldstart.system.paths import Cache
from coldstart.system.snapshot import runtime_image
from coldstart.weights.prefetch import client


@pytest.fixture
def image(home: Path) -> Path:
    """Publish an image without a fingerprint."""
    made = Cache.at().runtimes / ("a" * 64)
    with runtime_image.publish_image(made) as partial:
        (partial / "pages-1.img").write_bytes(b"x" * 99)
        said = {"python": sys.executable, "vllm": "0.32.0", "made": "2026-01-01T00:00:00Z"}
        (partial / runtime_image.ABOUT).write_text(json.dumps(said))
    return made


def test_freeze_fails_without_criu(run: Run, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLDSTART_CRIU", "/nonexistent/criu")
    said = run("template", "freeze", code=1).stderr
    assert "/nonexistent/criu was not found" in said and "coldstart doctor" in said
    assert not Cache.at().runtimes.exists()
    assert "nan is not above 0" in run("template", "freeze", "--ready-timeout", "nan", code=2).stderr


def test_status_lists_image_with_its_defect(run: Run, image: Path) -> None:
    shown = json.loads(run("template", "status", "--format", "json").stdout)
    (frozen,) = shown["frozen"]
    assert frozen["directory"] == str(image) and frozen["vllm"] == "0.32.0" and frozen["size"] >= 99
    assert "has no valid fingerprint" in frozen["obstacle"]
    assert "every model, 8.0 KiB" in run("template", "status").stdout


def test_template_has_the_arguments_of_the_bundle_when_none_are_typed(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_models.require_vllm()
    tiny_models.place("tiny-llama", Cache.at().models)
    made = publish_recorded("tiny-llama", ("--max-model-len", "512"))
    begun: list[LaunchPlan] = []

    def start_template(level: str, plan: LaunchPlan, model: str, timeout_s: float) -> SimpleNamespace:
        begun.append(plan)
        return SimpleNamespace(model=model, key=plan.key, pid=1)

    monkeypatch.setattr(preparation, "start_template", start_template)
    assert main("template", "start", "tiny-llama") == 0 and [plan.key for plan in begun] == [made.key.digest]
    said = capsys.readouterr().err
    assert "Using the arguments of tiny-llama:v1: --max-model-len 512\n" in said
    assert said.endswith("Next: coldstart serve tiny-llama --mode template-engine\n")


BYTES = 300_000


@pytest.fixture
def model(home: Path) -> Iterator[Path]:
    """Yield a model directory; stop the prefetcher of the test afterwards."""
    directory = home / "mine"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["X"]}))
    halves = np.random.default_rng(1).integers(0, 256, (2, BYTES // 2), np.uint8)
    save_file(dict(zip("ab", halves, strict=True)), directory / "model.safetensors")
    yield directory
    with suppress(client.PrefetchError):
        client.request("stop")


@pytest.mark.slow
def test_start_status_stop(run: Run, model: Path) -> None:
    size = (model / "model.safetensors").stat().st_size
    with run_server(model) as server:
        done = run("prefetch", "start", str(model), "--weights-from", server.url)
        assert done.stdout.startswith("mine: ") and "Next: coldstart prefetch status" in done.stderr
        assert server.total() == size
        again = run("prefetch", "start", str(model), "--weights-from", server.url, "--format", "json")
        assert json.loads(again.stdout)["fetched_bytes"] == size == server.total()
    status = json.loads(run("prefetch", "status", "--format", "json").stdout)
    (one,) = status["prefetchers"]
    assert status["running"] and one["budget_bytes"] >= one["memory_bytes"] >= size
    assert (one["source"], one["ready_bytes"], one["leases"]) == (server.url, size, 0)
    assert f"{one['pid']}" in run("prefetch", "status").stdout
    assert run("prefetch", "stop").stdout == f"stopped {one['pid']}\n"
    assert run("prefetch", "status").stdout == "no prefetcher is running\n"
    assert json.loads(run("prefetch", "status", "--format", "json").stdout)["running"] is False


def test_start_reports_invalid_requests(run: Run, model: Path) -> None:
    with run_server(model) as server:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("COLDSTART_PREFETCH_MEMORY_BYTES", "9")
            short = run("prefetch", "start", str(model), "--weights-from", server.url, code=1)
        assert "the prefetcher is limited to 9 bytes" in short.stderr
        offline = ("--weights-from", server.url, "--offline")
        assert "--offline is set" in run("prefetch", "start", str(model), *offline, code=4).stderr
    client.request("stop")
    (model / "model.safetensors").unlink()
    assert "--weights-from" in run("prefetch", "start", str(model), code=2).stderr
