"""The reports show the document's figures, escape what they are given, and need nothing from outside."""

import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from typing import Any

import pytest

from coldstart.measure.report import html, markdown, rows, svg

VOID = {"meta", "br"}


class Checked(HTMLParser):
    """Every element closes in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.outside += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_refers_to_nothing(document: dict[str, Any]) -> None:
    page = html.render(document)
    parser = Checked()
    parser.feed(page)
    assert parser.open == [] and parser.outside == []
    assert "url(" not in page and "@import" not in page
    pictures = re.findall(r"<svg.*?</svg>", page, flags=re.S)
    assert len(pictures) == 2 + 2  # bars, stacks, a timeline per mode that ran
    for picture in pictures:
        ElementTree.fromstring(picture)


def test_the_page_embeds_the_document(document: dict[str, Any]) -> None:
    document["model"] = "</script><b>"
    page = html.render(document)
    (embedded,) = re.findall(r'id="bench">(.*?)</script>', page, flags=re.S)
    assert json.loads(embedded) == document
    assert "<b>" not in page


def test_a_stack_adds_up_to_the_start(document: dict[str, Any]) -> None:
    fresh = document["modes"]["fresh"]
    assert html.stack(fresh) == pytest.approx({"imports <torch>": 3.0, html.REST: 3.0})
    fresh["phases"]["imports <torch>"]["median"] = 7.0
    assert html.stack(fresh) == pytest.approx({"until listening": 5.4, "first request": 0.6})


def test_rows_hold_the_figures(document: dict[str, Any]) -> None:
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


def test_bars_are_as_long_as_their_seconds() -> None:
    picture = ElementTree.fromstring(svg.bars("t", [svg.Bar("a", 1, 1, 1, ""), svg.Bar("b", 4, 3, 8, "")]))
    one, four = (float(r.attrib["width"]) for r in picture.iter("{http://www.w3.org/2000/svg}rect"))
    assert four == pytest.approx(4 * one, abs=0.2)
    assert four == pytest.approx(svg.PLOT / 2, abs=0.2)


def test_empty_pictures_are_pictures() -> None:
    for picture in (svg.bars("t", []), svg.stacks("t", {}), svg.timeline("t", [])):
        ElementTree.fromstring(f"<x>{picture}</x>")
