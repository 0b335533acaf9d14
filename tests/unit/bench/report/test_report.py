"""Reports show the document's figures, escape all texts, and need no network."""

import io
from typing import Any, ClassVar

from support import pages

from coldstart.bench.report import html, markdown, rows
from coldstart.bench.report.page import items, page
from coldstart.bench.report.table import Table


def test_page_is_self_contained_and_plots_have_axes_and_values(document: dict[str, Any]) -> None:
    page = html.render(document)
    pages.check(page)
    found = pages.plots(page)
    assert len(found) == 2 + 2  # first tokens, rounds, a timeline per mode that ran
    labels = [pages.axis_labels(plot) for plot in found]
    assert labels[:3] == [
        {"from launch to the first token (s)"},
        {"round", "time to the first token (s)"},
        {"time since the launch (s)"},
    ]
    assert all(list(plot.iter("title")) for plot in found)


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


def test_a_page_escapes_its_texts() -> None:
    page_ = page("a <b>", items(["c"]))
    pages.check(page_)
    assert "a &lt;b&gt;" in page_


class TestTable:
    ROWS = ({"name": "a", "n": 1, "s": 0.5, "ok": True}, {"name": "b"})
    TABLE: ClassVar = Table(("name", "n", "s", "ok"), lambda: TestTable.ROWS)

    def test_csv_leaves_missing_values_empty(self) -> None:
        self.TABLE.write_csv(out := io.StringIO())
        assert out.getvalue() == "name,n,s,ok\na,1,0.5,True\nb,,,\n"
        Table(("name",), list).write_csv(out := io.StringIO())
        assert out.getvalue() == "name\n"

    def test_texts_show_a_dash_for_missing_values(self) -> None:
        assert list(self.TABLE.texts()) == [["a", "1", "0.5", "True"], ["b", "-", "-", "-"]]
