"""Render a command's result as JSON, CSV, Markdown, or a self-contained HTML page with plots.

Invariant: all text on the HTML page is escaped. The page contains no script, and its content security policy blocks requests.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from typing import Any

FORMATS = ("json", "csv", "html", "markdown")
Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Headers, and rows of text cells."""
Plot = tuple[str, str]  # heading, and HTML
Point = tuple[float, float]
Bar = tuple[str, float, float, int, float | None]
"""Row of a bar plot: label, start and end in seconds, index of its color, and optional median."""

# Okabe and Ito's palette: distinguishable with any color vision. The last is for "rest".
COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800", "#999999")
_GRID_POSITIONS = (0.0, 0.25, 0.5, 0.75, 1.0)
_GRID = f'<path class="grid" d="{"".join(f"M0 {100 * at}H100M{100 * at} 0V100" for at in _GRID_POSITIONS)}"/>'
_STYLE = """
:root{color-scheme:light dark;--page:#fff;--text:#222;--line:#8886}
@media(prefers-color-scheme:dark){:root{--page:#16181c;--text:#e6e6e6}}
body{font:15px/1.5 system-ui,sans-serif;max-width:76rem;margin:2rem auto;padding:0 1rem;overflow-wrap:anywhere;
background:var(--page);color:var(--text)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .6rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child{text-align:left}
h2{margin-top:2rem}
figure{margin:0;max-width:48rem;display:grid;grid-template-columns:auto 1fr;gap:.3rem;font-size:.8rem}
figcaption,.wide{grid-column:1/-1}figcaption span{margin-right:1rem}
figure table{width:100%}figure td,figure th{font-weight:400;padding:.1rem .4rem;border:0}
.track{position:relative;width:60%}.track i{position:absolute;top:20%;height:60%;min-width:2px}
.ends{display:flex;justify-content:space-between}.y{flex-direction:column-reverse;text-align:right}.x{grid-column:2}
svg{width:100%;height:12rem;overflow:visible;fill:none}svg *{vector-effect:non-scaling-stroke;stroke-width:1.5}
svg .grid{stroke:var(--line);stroke-width:1}
"""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width"><style>{style}</style></head><body><main>
{body}
</main></body></html>
"""


@dataclass(frozen=True)
class Report:
    """Result of a command: a JSON document, one row per measurement, tables and notes to print, and plots for HTML."""

    title: str
    document: Mapping[str, Any]
    rows: Sequence[Mapping[str, object]]
    tables: Sequence[Table]
    notes: Sequence[str] = ()
    plots: Sequence[Plot] = ()

    def render(self, file_format: str) -> str:
        """Render the report in one of FORMATS."""
        if file_format == "json":
            return json.dumps(self.document, indent=2, default=str) + "\n"
        if file_format == "csv":
            columns = dict.fromkeys(name for row in self.rows for name in row)
            writer = csv.DictWriter(out := StringIO(), [*columns], lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)
            return out.getvalue()
        if file_format == "markdown":
            text = [f"# {_escape_cell(self.title)}", ""]
            for headers, cells in self.tables:
                rule = ["---", *["---:"] * (len(headers) - 1)]
                text += [
                    "| " + " | ".join(map(_escape_cell, row)) + " |" for row in (headers, rule, *cells)
                ] + [""]
            return "\n".join([*text, *(f"- {_escape_cell(note)}" for note in self.notes), ""])
        parts = [
            f"<h1>{escape(self.title)}</h1>",
            "<ul>",
            *(f"<li>{escape(note)}</li>" for note in self.notes),
            "</ul>",
        ]
        for headers, cells in self.tables:
            head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in headers)
            body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in cells)
            table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
            # Let a wide table scroll separately, even with the keyboard.
            parts.append(f'<div class="scroll" tabindex="0" role="region" aria-label="Table">{table}</div>')
        parts += [f"<section><h2>{escape(heading)}</h2>{drawn}</section>" for heading, drawn in self.plots]
        return _PAGE.format(title=escape(self.title), style=_STYLE, body="\n".join(parts))


def draw_bars(label: str, rows: Sequence[Bar]) -> str:
    """Return an HTML bar plot of durations in seconds. A bar with a median shows it in color, and the range in gray."""
    longest, drawn = max((row[2] for row in rows), default=0.0) or 1.0, ""
    for name, begin, end, color, median in rows:
        spans = [(begin, end, color)] if median is None else [(begin, end, -1), (0.0, median, color)]
        marks = ""
        for low, high, number in spans:
            place = f"left:{low / longest:.2%};width:{(high - low) / longest:.2%}"
            marks += f'<i style="{place};background:{COLORS[number % len(COLORS)]}"></i>'
        text = (
            f"{begin:.2f} to {end:.2f} s" if median is None else f"{median:.2f} s ({begin:.2f} to {end:.2f})"
        )
        drawn += f'<tr><th scope="row">{escape(name)}</th><td class="track">{marks}</td><td>{text}</td></tr>'
    return f'<figure><figcaption>{escape(label)}</figcaption><table class="wide">{drawn}</table></figure>'


def draw_lines(
    series: Mapping[str, Iterable[Point]], x_label: str, y_label: str, *, allow_log: bool = False
) -> str:
    """Return an HTML line plot of named (x, y) series. With `allow_log`, a wide range gets a logarithmic x axis."""
    points = {name: [(float(x), float(y)) for x, y in pairs] for name, pairs in series.items()}
    positive_x = [x for of in points.values() for x, _ in of if x > 0] or [1.0]
    top = max((y for of in points.values() for _, y in of), default=0.0) or 1.0
    low, high = min(positive_x), max(positive_x)
    is_log = allow_log and high > 20 * low
    marks = names = ""
    for number, (name, of) in enumerate(points.items()):
        shares = ((math.log(max(x, low) / low, high / low) if is_log else x / high, y / top) for x, y in of)
        path = " ".join(f"{100 * x:.2f},{100 - 100 * y:.2f}" for x, y in shares)
        marks += f'<polyline stroke="{COLORS[number % len(COLORS)]}" points="{path}"/>'
        names += f'<span><b style="color:{COLORS[number % len(COLORS)]}">■</b> {escape(name)}</span>'
    x_ends = "".join(
        f"<span>{low * (high / low) ** at if is_log else high * at:.3g}</span>" for at in _GRID_POSITIONS
    )
    y_ends = "".join(f"<span>{top * at:.3g}</span>" for at in _GRID_POSITIONS)
    return (
        f"<figure><figcaption>{escape(y_label)} {names if len(points) > 1 else ''}</figcaption>"
        f'<div class="ends y">{y_ends}</div><svg viewBox="0 0 100 100" preserveAspectRatio="none">{_GRID}{marks}</svg>'
        f'<div class="ends x">{x_ends}</div><div class="x">{escape(x_label)}</div></figure>'
    )


def _escape_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
