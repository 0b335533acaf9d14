"""Reports show the document's figures, escape all texts, and need no network."""

import re
from typing import Any

import pytest
from support import pages

from coldstart.bench.report import starts, svg
from coldstart.bench.report.report import Report


def test_page_is_self_contained_and_plots_have_axes_and_values(document: dict[str, Any]) -> None:
    page = starts.report(document).render("html")
    pages.check(page)
    found = pages.plots(page)
    assert len(found) == 1 + 2  # first tokens, a timeline per mode that ran
    labels = [pages.axis_labels(plot) for plot in found]
    assert labels == [
        {"from launch to the first token (s)"},
        *[{"time since the launch (s)"}] * 2,
    ]
    assert all(list(plot.iter("title")) for plot in found)


@pytest.mark.parametrize(
    ("far", "ticks"), [(2.0, ["0", "0.5", "1", "1.5", "2"]), (2000.0, ["1", "10", "100", "1000"])]
)
def test_values_far_apart_are_on_a_logarithmic_axis(far: float, ticks: list[str]) -> None:
    entries = {
        name: dict.fromkeys(("min", "median", "max"), value) for name, value in (("a", 1.0), ("b", far))
    }
    (found,) = pages.plots(svg.ranges(entries))
    shown = [one.text for one in found.iter("text") if one.attrib["class"] == "x"]
    assert shown == ticks


def test_lines_begin_and_end_with_their_points() -> None:
    (found,) = pages.plots(svg.lines({"a": [(0.0, 0.0), (10.0, 4.0)]}, "x", "y", step=True))
    (path,) = found.iter("path")
    assert re.fullmatch(r"M48.0 170.0H[\d.]+V[\d.]+", path.attrib["d"])


def test_rows_contain_the_figures(document: dict[str, Any]) -> None:
    (headers, shown), (_, stages) = starts.tabulate(document)
    assert stages[1] == ["fresh", *["1.00"] * 6]
    table = [dict(zip(headers, row, strict=True)) for row in shown]
    assert [row["mode"] for row in table] == ["vllm-warm", "fresh"]
    assert table[1]["first token (s)"] == "6.00"
    assert (table[1]["ratio"], table[1]["95 % interval"]) == ("5.0x", "5.0 to 5.0")
    assert table[1]["% of floor"] == "84"  # 5 s of imports and 0.01 s of service, of 6 s
    assert table[1]["latency ratio"] == "1.000 ok"
    assert starts.list_notes(document)[-1] == "snapshot could not run: no <CRIU> | here"


def test_csv_has_each_number_by_its_path_in_the_json(document: dict[str, Any]) -> None:
    shown = starts.report(document).render("csv").splitlines()
    rows = [dict(zip(shown[0].split(","), line.split(","), strict=True)) for line in shown[1:]]
    assert rows[1]["mode"] == "fresh" and float(rows[1]["first_token_s.median"]) == 6.0
    assert float(rows[1]["ratio_ci95.0"]) == 5.0 and float(rows[1]["stages.weights.median"]) == 1.0
    assert rows[2]["unavailable"] == "no <CRIU> | here" and rows[2]["first_token_s.median"] == ""


def test_markdown_keeps_its_table(document: dict[str, Any]) -> None:
    document["baseline"] = {
        "modes": {"fresh": {"verdict": "ok", "reason": None, "change_pct": 1.0, "ci95_pct": [-1, 2]}}
    }
    document["failures"] = ["fresh: a | b"]
    text = starts.report(document).render("markdown")
    table = [line for line in text.splitlines() if line.startswith("|")]
    columns = [len(starts.HEADERS) - 1] * 4 + [len(starts.STAGE_HEADERS) - 1] * 4
    assert [line.count(" | ") for line in table] == columns
    assert "- snapshot could not run: no &lt;CRIU> \\| here" in text
    assert "- fresh against the baseline: ok, +1.0 % (-1.0 to +2.0 %)" in text
    assert "- failed: fresh: a \\| b" in text


def test_empty_plots_are_plots() -> None:
    drawn = (
        svg.ranges({}),
        svg.timeline([]),
        svg.lines({}, "x", "y"),
        svg.lines({"a": []}, "x", "y"),
    )
    assert [len(pages.plots(one)) for one in drawn] == [1] * 4


def render(form: str, *rows: dict[str, object]) -> str:
    return Report("a <b>", {}, ("name", "n", "s", "ok"), lambda: rows, notes=["c"]).render(form)


def test_missing_values_are_empty_in_csv_and_a_dash_for_people() -> None:
    rows = ({"name": "a", "n": 1, "s": 0.5, "ok": True}, {"name": "b"})
    assert render("csv", *rows) == "name,n,s,ok\na,1,0.5,True\nb,,,\n"
    assert render("csv") == "name,n,s,ok\n"
    assert "| a | 1 | 0.5 | True |\n| b | - | - | - |" in render("markdown", *rows)
