"""Measurement of one run of a fake server that serves, dies, stays silent or detaches."""

import importlib
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from coldstart.bench import measure
from coldstart.bench.measure import RunSettings
from coldstart.errors import CommandFailedError
from coldstart.system.proc import processes
from coldstart.system.timeline import Span
from coldstart.validate import launch
from coldstart.vllm import counting

Fake = Callable[..., launch.Launcher]


def list_children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def test_run_measures_a_server_and_leaves_no_process(
    fake: Fake, settings: RunSettings, tmp_path: Path
) -> None:
    before = list_children()
    run = measure.run(fake("fresh", "busy"), tmp_path / "r", replace(settings, steady=True), 3)
    assert (run.mode, run.round) == ("fresh", 3)
    assert run.first_token_s >= 0.15
    assert run.cpu_s >= 0.14
    assert run.pss_bytes > 0
    assert sum(run.phases.values()) == pytest.approx(run.first_token_s)
    assert [len(tokens) for tokens, _ in run.responses] == [4, 4]
    assert run.steady is not None and run.steady.tokens_per_s > 0
    assert run.readiness["fast_path"] == {"compile": True}
    assert list_children() <= before


def test_a_server_that_never_answers_times_out(fake: Fake, settings: RunSettings, tmp_path: Path) -> None:
    before = list_children()
    with pytest.raises(CommandFailedError, match="no token within the time limit"):
        measure.run(fake("vllm-warm", "silent"), tmp_path / "r", replace(settings, ready_timeout_s=1.0), 0)
    assert list_children() <= before


def test_readiness_must_be_reported(
    fake: Fake, settings: RunSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "READY_FILE_TIMEOUT_S", 0.2)
    with pytest.raises(CommandFailedError, match="cannot be verified"):
        measure.run(fake("fresh", "unready"), tmp_path / "r", settings, 0)


def test_exited_process_has_no_memory() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert processes.measure_pss_bytes([process.pid]) == 0


def span(name: str, start_s: float, end_s: float) -> Span:
    return Span(name, start_s, end_s, "vllm")


def test_stages_do_not_count_a_moment_twice_within_a_stage() -> None:
    spans = [
        span("import torch", 0.0, 2.0),
        span("load the tokenizer", 1.0, 2.5),  # beside the engine
        span("load the model", 2.0, 5.0),
        span("construct model", 2.2, 2.7),
        span("read tensors", 3.0, 5.0),
        span("compile the model or size the KV cache", 5.0, 6.0),
        span("allocate the KV cache", 6.0, 6.5),
        span("compile or warm up", 6.5, 9.0),
        span("compile or warm up", 6.6, 8.9),  # a method that calls the overridden one
    ]
    found = measure.measure_stages(spans, 0.0, 10.0)
    assert found == pytest.approx(
        {"structure": 0.5, "weights": 2.5, "tokenizer": 1.5, "KV": 1.5, "capture": 2.5, "rest": 2.0}
    )


def test_stage_that_began_before_the_launch_counts_from_the_launch() -> None:
    found = measure.measure_stages([span("load the model", -5.0, 1.0)], 0.0, 2.0)
    assert (found["weights"], found["rest"]) == (1.0, 1.0)


def test_stages_are_unknown_without_a_span() -> None:
    assert measure.measure_stages([], 0.0, 1.0) == {}


def test_each_stage_has_a_step_of_vllm() -> None:
    steps = {name for steps in counting.STEPS.values() for name in steps.values()}
    assert all(names & steps for names in measure.STAGE_SPANS.values())


@pytest.mark.slow
def test_installed_vllm_has_each_step() -> None:
    for (module, kind), steps in counting.STEPS.items():
        assert all(hasattr(getattr(importlib.import_module(module), kind), method) for method in steps)
