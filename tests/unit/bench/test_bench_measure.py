"""Measurement of one run of a fake server that serves, dies, stays silent or detaches."""

import importlib
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_launcher import FakeLauncher as Fake

from coldstart.bench import compare, facts, measure
from coldstart.bench.measure import RunSettings
from coldstart.bench.result import SCHEMA_VERSION
from coldstart.bench.stats import paired_ratio, ratio_interval, summarize
from coldstart.errors import CommandFailedError, UsageError
from coldstart.system.proc import processes
from coldstart.system.timeline import Span
from coldstart.validate import launch
from coldstart.vllm import counting


def list_children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def test_run_measures_server_and_leaves_no_process(settings: RunSettings, tmp_path: Path) -> None:
    before = list_children()
    run = measure.run(Fake("fresh", "busy"), tmp_path / "r", replace(settings, measure_steady_state=True), 3)
    assert (run.mode, run.round) == ("fresh", 3)
    assert run.first_token_s >= 0.15
    assert run.cpu_s >= 0.14
    assert run.pss_bytes > 0
    assert sum(run.phases.values()) == pytest.approx(run.first_token_s)
    assert [len(tokens) for tokens, _ in run.responses] == [4, 4]
    assert run.steady is not None and run.steady.tokens_per_s > 0
    assert run.readiness["fast_path"] == {"compile": True}
    assert list_children() <= before


def test_a_server_that_never_answers_times_out(settings: RunSettings, tmp_path: Path) -> None:
    before = list_children()
    with pytest.raises(CommandFailedError, match="no token in time"):
        measure.run(Fake("vllm-warm", "silent"), tmp_path / "r", replace(settings, ready_timeout_s=1.0), 0)
    assert list_children() <= before


def test_readiness_must_be_reported(
    settings: RunSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "READY_FILE_TIMEOUT_S", 0.2)
    with pytest.raises(CommandFailedError, match="cannot be verified"):
        measure.run(Fake("fresh", "unready"), tmp_path / "r", settings, 0)


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
    assert measure.measure_stages([], 0.0, 1.0) == {}


def test_each_stage_has_a_step_of_vllm() -> None:
    steps = {name for steps in counting.STEPS.values() for name in steps.values()}
    assert all(names & steps for names in measure.STAGE_SPANS.values())


@pytest.mark.slow
def test_installed_vllm_has_each_step() -> None:
    for (module, kind), steps in counting.STEPS.items():
        assert all(hasattr(getattr(importlib.import_module(module), kind), method) for method in steps)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ([13.0, 13.1, 12.9, 13.0, 13.2], "regression"),
        ([10.1, 10.0, 10.2, 9.9, 10.0], "ok"),
        ([5.0, 5.1, 5.0, 5.2, 4.9], "ok"),
        ([8.0, 14.0, 12.0, 9.0, 13.0], "inconclusive"),
        ([20.0, 20.0], "inconclusive"),
    ],
)
def test_change_returns_the_verdict(now: list[float], expected: str) -> None:
    found = compare.compare_samples(now, [10.0, 10.1, 9.9, 10.0, 10.05], 10)
    assert found["verdict"] == expected


def document(seconds: list[float], **more: object) -> dict[str, Any]:
    samples = [{"round": i, "first_token_s": s, "cpu_s": 1.0} for i, s in enumerate(seconds)]
    return {
        "kind": "bench",
        "schema_version": SCHEMA_VERSION,
        "machine": facts.describe_machine(),
        "model": "tiny-llama",
        "modes": {"fresh": {"samples": samples}, "snapshot": {"unavailable": "no"}},
        **more,
    }


def test_documents_are_compared_by_the_modes_both_measured() -> None:
    found = compare.compare_documents(document([20.0] * 5), document([10.0] * 5), 50)
    assert found["modes"] == {
        "fresh": {"verdict": "regression", "change_pct": 100.0, "ci95_pct": (100.0, 100.0), "reason": None}
    }
    other = compare.compare_documents(document([20.0] * 5, model="tiny-opt"), document([10.0] * 5), 50)
    assert other["modes"]["fresh"]["reason"] == "measured with the model tiny-llama"
    assert compare.describe_regressions(other) == []
    assert compare.describe_regressions(found) == [
        "fresh: 100.0 % slower than the baseline (at least 100.0 %, allowed 50 %)"
    ]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "{}",
        *(json.dumps(document([1.0], **{k: 99})) for k in ("schema_version", "machine", "modes")),
    ],
)
def test_load_refuses_a_file_that_is_not_a_baseline(tmp_path: Path, text: str) -> None:
    path = tmp_path / "base.json"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        compare.load_baseline(path)
    assert caught.value.hint is not None and "bench" in caught.value.hint


seconds = st.floats(0.1, 100)


def test_summarize_returns_median_and_range() -> None:
    assert summarize([3, 1, 2]) == {"median": 2, "min": 1, "max": 3, "n": 3}
    with pytest.raises(ValueError, match="empty list of samples"):
        summarize([])


def test_a_paired_ratio_cancels_what_rounds_share() -> None:
    slow = {0: 10.0, 1: 40.0, 2: 20.0, 3: 30.0, 4: 100.0}
    result = paired_ratio(slow, {key: value / 5 for key, value in slow.items()})
    assert result is not None
    ratio, (low, high) = result
    assert ratio == low == high == 5


@given(st.lists(seconds, min_size=3, max_size=9), st.lists(seconds, min_size=3, max_size=9))
def test_the_interval_is_repeatable_and_within_the_extremes(one: list[float], two: list[float]) -> None:
    low, high = ratio_interval(one, two)
    assert min(one) / max(two) <= low <= high <= max(one) / min(two)
    assert (low, high) == ratio_interval(one, two)
