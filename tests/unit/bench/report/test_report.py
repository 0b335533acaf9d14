"""Reports show the document's figures, escape all texts, and need no network.

Tests import what imports bokeh: every worker collects this file.
"""

import io
import json
import re
from typing import Any, ClassVar

import pytest
from support import pages

from coldstart.bench.report import frames, markdown, rows
from coldstart.bench.report.page import items, library, page, plot


def test_page_is_self_contained_and_plots_have_axes_and_values(document: dict[str, Any]) -> None:
    from coldstart.bench.report import html

    page = html.render(document)
    pages.check(page)
    found = pages.plots(page)
    assert len(found) == 3 + 2  # first tokens, phases, rounds, a timeline per mode that ran
    assert all(
        len(pages.axis_labels(plot)) == 2 - (number in (0, 1, 3, 4)) for number, plot in enumerate(found)
    )
    assert {
        "from launch to the first token (s)",
        "share of the start",
        "time since the launch (s)",
    } <= set().union(*map(pages.axis_labels, found))
    assert all(pages.objects(plot, "HoverTool") for plot in found)


def test_values_far_apart_are_on_a_logarithmic_axis() -> None:
    from coldstart.bench.report import plots

    for far, scale in ((2.0, "LinearScale"), (2000.0, "LogScale")):
        entries = [plots.ValueRange("a", 1.0, 1.0, 1.0), plots.ValueRange("b", far, far, far)]
        (found,) = pages.plots(plot(plots.ranges(entries, "time")))
        assert pages.objects(found, scale)
        (found,) = pages.plots(plot(plots.distributions({"a": [(1.0, 0.0), (far, 1.0)]}, "time")))
        assert pages.objects(found, scale)


def test_the_page_embeds_the_document(document: dict[str, Any]) -> None:
    from coldstart.bench.report import html

    document["model"] = "</script><b>"
    page = html.render(document)
    (embedded,) = re.findall(r'id="bench">(.*?)</script>', page, flags=re.S)
    assert json.loads(embedded) == document
    assert "<b>" not in page.replace(library(), "")


def test_a_stack_adds_up_to_the_start(document: dict[str, Any]) -> None:
    from coldstart.bench.report import html

    fresh = document["modes"]["fresh"]
    assert html.stack(fresh) == pytest.approx({"imports <torch>": 3.0, html.REST: 3.0})
    fresh["phases"]["imports <torch>"]["median"] = 7.0
    assert html.stack(fresh) == pytest.approx({"until listening": 5.4, "first request": 0.6})


def test_rows_contain_the_figures(document: dict[str, Any]) -> None:
    table = [dict(zip(rows.HEADERS, row, strict=True)) for row in rows.rows(document)]
    assert [row["mode"] for row in table] == ["vllm-warm", "fresh"]
    assert table[1]["first token (s)"] == "6.00"
    assert (table[1]["ratio"], table[1]["95 % interval"]) == ("5.0x", "5.0 to 5.0")
    assert table[1]["% of floor"] == "84"  # 5 s of imports and 0.01 s of service, of 6 s
    assert table[1]["latency ratio"] == "1.000 ok"
    assert rows.unavailable(document) == ["snapshot could not run: no <CRIU> | here"]


def test_markdown_keeps_its_table(document: dict[str, Any]) -> None:
    document["baseline"] = {
        "modes": {"fresh": {"verdict": "ok", "reason": None, "change_pct": 1.0, "ci95_pct": [-1, 2]}}
    }
    document["failures"] = ["fresh: a | b"]
    text = markdown.render(document)
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count(" | ") for line in table} == {len(rows.HEADERS) - 1}
    assert len(table) == 4
    assert "- snapshot could not run: no &lt;CRIU> \\| here" in text
    assert "- fresh against the baseline: ok, +1.0 % (-1.0 to +2.0 %)" in text
    assert "- failed: fresh: a \\| b" in text


def test_a_stack_begins_where_the_one_before_ends() -> None:
    from coldstart.bench.report import plots

    (found,) = pages.plots(plot(plots.stacks({"a": {"x": 1.0, "y": 2.0}, "b": {"y": 3.0}})))
    bars = [dict(data["data"]["entries"]) for data in pages.objects(found, "ColumnDataSource")]
    x, y = sorted(bars, key=lambda bar: bar["phase"][0])
    assert (x["left"], x["right"]) == ([0.0, 0.0], [pytest.approx(1 / 3), 0.0])
    assert (y["left"], y["right"]) == ([pytest.approx(1 / 3), 0.0], [1.0, 1.0])


def test_empty_plots_are_plots() -> None:
    from coldstart.bench.report import plots

    for figure in (plots.ranges([], "t"), plots.stacks({}), plots.timeline([]), plots.over_time([], "x")):
        assert pages.plots(plot(figure))


def test_a_page_without_plots_carries_no_library() -> None:
    page_ = page("a <b>", items(["c"]))
    pages.check(page_)
    assert len(page_) < 2000 and "a &lt;b&gt;" in page_


class TestFrames:
    ROWS = ({"name": "a", "n": 1, "s": 0.5, "ok": True}, {"name": "b", "n": None, "s": None, "ok": None})
    COLUMNS: ClassVar = {"name": "string", "n": "Int64", "s": "Float64", "ok": "boolean"}

    def test_csv_leaves_missing_values_empty(self) -> None:
        frames.write_csv(frames.Table.create(self.COLUMNS, self.ROWS), out := io.StringIO())
        assert out.getvalue() == "name,n,s,ok\na,1,0.5,True\nb,,,\n"
        frames.write_csv(frames.Table.create(self.COLUMNS, []), out := io.StringIO())
        assert out.getvalue() == "name,n,s,ok\n"

    def test_texts_show_a_dash_for_missing_values(self) -> None:
        assert list(frames.Table.create(self.COLUMNS, self.ROWS).texts()) == [
            ["a", "1", "0.5", "True"],
            ["b", "-", "-", "-"],
        ]
