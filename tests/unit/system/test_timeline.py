"""The timeline merges processes on one clock and is valid trace-event JSON."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstart.contract.environment import TIMELINE_EVENTS
from coldstart.system import start_progress, timeline
from coldstart.system.start_progress import KEY, LineReader, ProgressCounter, StartProgress
from coldstart.system.timeline import Span, Timeline


def test_find_longest_counts_no_span_for_those_within_it() -> None:
    line = Timeline()
    assert line.find_longest() is None
    line.spans.append(Span("command", 0.0, 9.0, "command", pid=1))
    line.spans.append(Span("imports", 10.0, 14.0, "server", pid=2))
    line.spans.append(Span("engine", 14.0, 20.0, "server", pid=2))
    line.spans.append(Span("load", 14.5, 17.5, "engine", pid=3))
    assert line.find_longest() == ("command", 9.0)
    assert line.find_longest(since_s=10.0) == ("imports", 4.0)
    line.spans.append(Span("load", 17.5, 19.0, "engine", pid=3))
    assert line.find_longest(since_s=10.0) == ("load", 4.5)


def test_server_outlives_its_recorder_and_full_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(TIMELINE_EVENTS, str(tmp_path / "gone" / "events"))
    timeline.emit_span("a", 0.0, 1.0, "t")
    assert list(tmp_path.iterdir()) == []
    events = tmp_path / "events"
    monkeypatch.setenv(TIMELINE_EVENTS, str(events))
    monkeypatch.setattr(timeline, "MAX_BYTES", 300)
    for _ in range(10):
        timeline.emit_span("a", 0.0, 1.0, "t")
    assert 0 < len(Timeline.read(events).spans) < 10 and events.stat().st_size <= 300


spans = st.builds(
    lambda name, start, length, track, pid: Span(name, start, start + length, track, pid=pid),
    st.text(max_size=60),
    st.integers(0, 100),
    st.integers(0, 50),
    st.sampled_from(["a", "b"]),
    st.integers(1, 2),
)


@given(st.lists(spans, max_size=12))
def test_spans_of_one_thread_nest_or_are_apart(members: list[Span]) -> None:
    chrome = Timeline(members).build_chrome_trace()["traceEvents"]
    assert isinstance(chrome, list)
    complete = [event for event in chrome if event["ph"] == "X"]
    assert len(complete) == len(members)
    for i, a in enumerate(complete):
        for b in complete[i + 1 :]:
            if a["tid"] == b["tid"]:
                (a0, a1), (b0, b1) = [(e["ts"], e["ts"] + e["dur"]) for e in (a, b)]
                assert a1 <= b0 or b1 <= a0 or (a0 <= b0 and b1 <= a1) or (b0 <= a0 and a1 <= b1)


def read(pipe: int) -> list[StartProgress]:
    return [StartProgress.parse(line[KEY]) for line in LineReader(pipe).read() or ()]


def test_a_span_reports_its_stage_when_it_begins(pipe: int) -> None:
    with timeline.measure("import torch", track="server"):
        assert read(pipe) == [StartProgress("import torch")]
    start_progress.stop_reporting()
    with timeline.measure("later", track="server"):
        assert read(pipe) == []


def test_counter_reports_its_first_and_last_figure_and_few_between(pipe: int) -> None:
    counter = ProgressCounter("load weights", 10_000, "bytes")
    for done in range(1, 10_001):
        counter.report_done(done)
    found = [one.done for one in read(pipe)]
    assert (found[0], found[-1]) == (1, 10_000) and len(found) < 100


def test_nothing_is_reported_to_a_reader_that_has_gone(pipe: int) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, pipe)
    os.close(nothing)
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
