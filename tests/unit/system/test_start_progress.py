"""Progress of a start on the pipe of readiness: its lines, its words, and that it never blocks a start."""

from __future__ import annotations

import os

import pytest
from support.progress_pipe import pipe

from coldstart.contract.plan import READY_FD_ENV
from coldstart.system import start_progress, timeline
from coldstart.system.start_progress import KEY, Counter, LineReader, StartProgress

__all__ = ["pipe"]


def read(pipe: int) -> list[StartProgress]:
    return [StartProgress.parse(line[KEY]) for line in LineReader(pipe).read() or ()]


def test_a_span_reports_its_stage_when_it_begins(pipe: int) -> None:
    with timeline.measure("import torch", track="server"):
        assert read(pipe) == [StartProgress("import torch")]
    start_progress.end()
    with timeline.measure("later", track="server"):
        assert read(pipe) == []


def test_counter_reports_its_first_and_last_figure_and_few_between(pipe: int) -> None:
    counter = Counter("load weights", 10_000, "bytes")
    for done in range(1, 10_001):
        counter.show(done)
    found = [one.done for one in read(pipe)]
    assert (found[0], found[-1]) == (1, 10_000) and len(found) < 100


def test_nothing_is_reported_to_a_reader_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    monkeypatch.setenv(READY_FD_ENV, str(writer))
    start_progress.begin()
    os.close(writer)
    os.close(reader)
    start_progress.report(StartProgress("load weights"))
    assert timeline.on_begin is None


def test_figures_that_cannot_be_sent_fail_no_start(pipe: int) -> None:
    start_progress.report(StartProgress("load weights", object(), 1))  # type: ignore[arg-type]
    start_progress.report(StartProgress("x" * 10_000))
    assert read(pipe) == []


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (StartProgress("import torch"), "import torch"),
        (StartProgress("load weights", 3, 8, "shards"), "load weights: 3 of 8 shards"),
        (StartProgress("load weights", 6 << 28, 3 << 30, "bytes"), "load weights: 1.5 of 3.0 GiB"),
        (StartProgress("load weights", 1, 12, "bytes"), "load weights: 1 of 12 B"),
    ],
)
def test_progress_in_words(progress: StartProgress, words: str) -> None:
    assert progress.describe() == words == progress.build_document()["text"]
