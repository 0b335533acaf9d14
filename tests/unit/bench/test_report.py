"""Reports show the document's figures, escape all texts, and need no network."""

import json
from typing import Any

import pytest
from support import pages

from coldstart.bench import report, result, starts
from coldstart.bench.measure import STAGES, MeasuredRun, SteadyState
from coldstart.bench.runner import BenchRuns

PROOF = {"fast_path": {"compile": True}, "fallbacks": []}


def run(mode: str, number: int, seconds: float) -> MeasuredRun:
    spans = [
        {"name": "until listening", "track": "harness", "start_s": 0.0, "end_s": seconds * 0.9},
        {"name": "first request", "track": "harness", "start_s": seconds * 0.9, "end_s": seconds},
        {"name": "imports <torch>", "track": "server", "start_s": 0.0, "end_s": seconds / 2},
    ]
    phases = {
        "until listening": seconds * 0.9,
        "first request": seconds * 0.1,
        "imports <torch>": seconds / 2,
    }
    steady = SteadyState(latency_s=0.1, tokens_per_s=500.0)
    return MeasuredRun(
        mode,
        number,
        seconds,
        seconds / 2,
        2**29,
        phases,
        dict.fromkeys(STAGES, seconds / 6),
        spans,
        [((1, 2), "a")],
        steady,
        PROOF,
    )


@pytest.fixture
def document() -> dict[str, Any]:
    """A document in which vllm-warm takes 30 s, fresh 6 s, and a snapshot is impossible."""
    measured = BenchRuns(
        ["vllm-warm", "fresh", "snapshot"],
        runs={mode: [run(mode, i, s) for i in range(5)] for mode, s in (("vllm-warm", 30.0), ("fresh", 6.0))},
        unavailable={"snapshot": "no <CRIU> | here"},
    )
    made = result.build_document(
        measured, model="tiny-llama", vllm_args=[], command_line=["coldstart", "bench"]
    )
    return json.loads(json.dumps(made))


def test_page_is_self_contained_and_plots_have_labels_and_values(document: dict[str, Any]) -> None:
    page = starts.build_report(document).render("html")
    pages.check(page)
    first, *timelines = pages.plots(page)
    assert pages.read_labels(first) == {"median, and range in gray"}
    assert [cell.text for cell in first.iter("td")][1::2] == [
        "30.00 s (30.00 to 30.00)",
        "6.00 s (6.00 to 6.00)",
    ]
    assert len(timelines) == 2  # of the modes that ran
    assert [one.text for one in timelines[1].iter("th")] == [
        "until listening",
        "imports <torch>",
        "first request",
    ]


def test_bars_begin_and_end_at_their_share_of_the_longest() -> None:
    (found,) = pages.plots(report.draw_bars("x", [("a", 1.0, 2.0, 0, None), ("b", 2.0, 8.0, 1, 4.0)]))
    drawn = [one.attrib["style"].rpartition(";")[0] for one in found.iter("i")]
    assert drawn == ["left:12.50%;width:12.50%", "left:25.00%;width:75.00%", "left:0.00%;width:50.00%"]


@pytest.mark.parametrize(
    ("far", "ticks", "points"),
    [
        (8.0, ["0", "2", "4", "6", "8"], "12.50,100.00 100.00,0.00"),
        (10_000.0, ["1", "10", "100", "1e+03", "1e+04"], "0.00,100.00 100.00,0.00"),
    ],
)
def test_values_far_apart_are_on_a_logarithmic_axis(far: float, ticks: list[str], points: str) -> None:
    (found,) = pages.plots(report.draw_lines({"a": [(1.0, 0.0), (far, 4.0)]}, "x", "y", allow_log=True))
    (axis,) = (one for one in found.iter("div") if one.attrib["class"] == "ends x")
    assert [one.text for one in axis] == ticks
    assert [one.attrib["points"] for one in found.iter("polyline")] == [points]
    assert pages.read_labels(found) == {"x", "y"}


def test_rows_contain_the_figures(document: dict[str, Any]) -> None:
    (headers, shown), (_, stages) = starts.tabulate(document)
    assert stages[1] == ["fresh", *["1.00"] * 6]
    table = [dict(zip(headers, row, strict=True)) for row in shown]
    assert [row["mode"] for row in table] == ["vllm-warm", "fresh"]
    assert table[1]["first token (s)"] == "6.00"
    assert (table[1]["ratio"], table[1]["95 % interval"]) == ("5.0x", "5.0 to 5.0")
    assert table[1]["latency ratio"] == "1.000 ok"
    document["modes"]["standby"] = document["modes"]["fresh"]
    assert [table[-1][0] for _, table in starts.tabulate(document)] == ["standby (wake to first token)"] * 2
    assert starts.list_notes(document)[-1] == "snapshot could not run: no <CRIU> | here"


def test_csv_has_a_row_for_each_measured_start(document: dict[str, Any]) -> None:
    shown = starts.build_report(document).render("csv").splitlines()
    assert shown[0] == "mode,round,first_token_s,cpu_s" and len(shown) == 11
    assert shown[1] == "vllm-warm,0,30.0,15.0" and shown[-1] == "fresh,4,6.0,3.0"


def test_markdown_keeps_its_table(document: dict[str, Any]) -> None:
    document["baseline"] = {
        "modes": {"fresh": {"verdict": "ok", "reason": None, "change_pct": 1.0, "ci95_pct": [-1, 2]}}
    }
    document["failures"] = ["fresh: a | b"]
    text = starts.build_report(document).render("markdown")
    table = [line for line in text.splitlines() if line.startswith("|")]
    columns = [len(starts.HEADERS) - 1] * 4 + [len(starts.STAGE_HEADERS) - 1] * 4
    assert [line.count(" | ") for line in table] == columns
    assert "- snapshot could not run: no &lt;CRIU> \\| here" in text
    assert "- fresh against the baseline: ok, +1.0 % (-1.0 to +2.0 %)" in text
    assert "- failed: fresh: a \\| b" in text


def test_empty_plots_are_plots() -> None:
    drawn = report.draw_bars("x", []), report.draw_lines({}, "x", "y"), report.draw_lines({"a": []}, "x", "y")
    assert [len(pages.plots(one)) for one in drawn] == [1] * 3
