"""Measurement of one run of a fake server that serves, dies, stays silent or detaches."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from coldstart.bench import measure
from coldstart.bench.measure import RunSettings
from coldstart.errors import CommandFailedError
from coldstart.validate import launch, process_tree

Fake = Callable[..., launch.Launcher]


def list_children() -> set[tuple[int, int]]:
    """Return process identifier and start time of each child of the test's own process."""
    return {(p.pid, p.started) for p in process_tree.snapshot().values() if p.parent == os.getpid()}


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
    assert [len(tokens) for tokens, _ in run.answers] == [4, 4]
    assert run.steady is not None and run.steady.tokens_per_s > 0
    assert run.readiness["fast_path"] == {"compile": True}
    assert list_children() <= before


def test_reported_phases_join_the_harness_own(
    fake: Fake, settings: RunSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def events(server: launch.LaunchedServer) -> object:
        began = server.launched_s
        lines = [
            f'{{"name": "old", "start_s": {began - 9}, "end_s": {began - 8}, "track": "t", "pid": 1}}',
            f'{{"name": "imports", "start_s": {began}, "end_s": {began + 0.1}, "track": "t", "pid": 1}}',
        ]
        server.files.events.write_text("\n".join(lines) + "\n")
        return object_of(server)

    object_of = launch.LaunchedServer.tail
    started = launch.launch

    def launching(launcher: launch.Launcher, files: launch.RunFiles, sockets: Path) -> launch.LaunchedServer:
        server = started(launcher, files, sockets)
        events(server)
        return server

    monkeypatch.setattr(launch, "launch", launching)
    run = measure.run(fake("fresh"), tmp_path / "r", settings, 0)
    assert list(run.phases) == [measure.LISTENING, measure.ANSWERING, "imports"]
    assert run.phases["imports"] == pytest.approx(0.1)
    assert run.stages["rest"] == run.first_token_s and run.stages["capture"] == 0


def test_a_server_that_never_answers_times_out(fake: Fake, settings: RunSettings, tmp_path: Path) -> None:
    before = list_children()
    with pytest.raises(CommandFailedError, match="no token within the time limit"):
        measure.run(fake("vllm-warm", "silent"), tmp_path / "r", replace(settings, ready_timeout_s=1.0), 0)
    assert list_children() <= before


def test_readiness_must_be_reported(
    fake: Fake, settings: RunSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "READY_PATIENCE_S", 0.2)
    with pytest.raises(CommandFailedError, match="unproven"):
        measure.run(fake("fresh", "unready"), tmp_path / "r", settings, 0)


def test_run_measures_and_ends_a_detached_server(fake: Fake, settings: RunSettings, tmp_path: Path) -> None:
    before = list_children()
    with process_tree.adopting_orphans():
        run = measure.run(fake("template-engine", "daemon"), tmp_path / "r", settings, 0)
    assert run.cpu_s >= 0.14
    assert run.pss_bytes > 0
    assert list_children() <= before


def test_a_server_that_ignores_the_request_to_stop_is_killed(
    fake: Fake, settings: RunSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "STOP_S", 0.3)
    monkeypatch.setattr(launch, "LEFTOVER_S", 0.3)
    before = list_children()
    measure.run(fake("fresh", "stubborn"), tmp_path / "r", settings, 0)
    assert list_children() <= before
