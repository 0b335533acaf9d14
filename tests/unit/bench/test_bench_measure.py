"""Measurement of one run of a fake server that serves, dies, stays silent or detaches."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from coldstart.bench import measure
from coldstart.bench.measure import RunSettings
from coldstart.errors import CommandFailedError
from coldstart.validate import launch

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
