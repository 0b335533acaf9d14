"""Report of a result: its document as JSON, and one table of rows as CSV, as Markdown and on one self-contained HTML page.

Invariant: all text on the page is escaped. The page runs no script, and its content security policy forbids every request.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from typing import Any

FORMS = ("json", "csv", "html", "markdown")
Shown = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Table for people: headers, and rows of text."""

_STYLE = """
:root{color-scheme:light dark;--page:#fff;--text:#222;--line:#8886}
@media(prefers-color-scheme:dark){:root{--page:#16181c;--text:#e6e6e6}}
body{font:15px/1.5 system-ui,sans-serif;max-width:76rem;margin:2rem auto;padding:0 1rem;overflow-wrap:anywhere;
background:var(--page);color:var(--text)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .6rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child{text-align:left}
h2{margin-top:2rem}h3{margin-bottom:.2rem}
figure{margin:0;max-width:48rem}svg{width:100%;overflow:visible;fill:var(--text);font-size:11px}
.grid{stroke:var(--line)}.y{text-anchor:end}.x{text-anchor:middle}
figcaption span{margin-right:1rem;display:inline-block}
figcaption i{display:inline-block;width:.8em;height:.8em;margin-right:.3em}
"""


@dataclass(frozen=True)
class Report:
    """Result of a command.

    - `document`: its JSON.
    - `rows`: the table with these `columns`, computed when a form needs it. A row may lack values.
    - `shown`: the tables for people, if they differ from the columns.
    - `notes`: sentences beside the table.
    - `parts`: further HTML of the page, such as plots.
    """

    title: str
    document: Mapping[str, Any]
    columns: Collection[str]
    rows: Callable[[], Iterable[Mapping[str, object]]]
    shown: Callable[[], Sequence[Shown]] | None = None
    notes: Sequence[str] = ()
    parts: Callable[[], Iterable[str]] = tuple

    def render(self, form: str) -> str:
        """Return the report in one of FORMS."""
        if form == "json":
            return json.dumps(self.document, indent=2, default=str) + "\n"
        if form == "csv":
            writer = csv.writer(out := StringIO(), lineterminator="\n")
            writer.writerow(self.columns)
            writer.writerows([row.get(name) for name in self.columns] for row in self.rows())
            return out.getvalue()
        if form == "markdown":
            title, notes = f"# {_cell(self.title)}", [f"- {_cell(note)}" for note in self.notes]
            tables = [line for shown in self.tables() for line in (*markdown_table(*shown), "")]
            return "\n".join([title, "", *tables, *notes, ""])
        return self._page()

    def tables(self) -> Sequence[Shown]:
        """Return the tables for people."""
        if self.shown is not None:
            return self.shown()
        return [([*self.columns], [[_text(row.get(name)) for name in self.columns] for row in self.rows()])]

    def _page(self) -> str:
        title = escape(self.title)
        notes = ["<ul>", *(f"<li>{escape(note)}</li>" for note in self.notes), "</ul>"] if self.notes else []
        tables = [html_table(*shown) for shown in self.tables()]
        body = "\n".join([f"<h1>{title}</h1>", *notes, *tables, *self.parts()])
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
            f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
            f"<body><main>\n{body}\n</main></body></html>\n"
        )


def flatten(found: Mapping[Any, Any], path: str = "") -> Iterator[tuple[str, object]]:
    """Yield each single value of a row with its path in the JSON, such as first_token_s.median and ratio_ci95.0."""
    for name, value in found.items():
        inner = dict(enumerate(value)) if isinstance(value, list | tuple) else value
        if isinstance(inner, Mapping) and name not in ("samples", "timeline"):
            yield from flatten(inner, f"{path}{name}.")
        elif not isinstance(inner, Mapping):
            yield f"{path}{name}", value


def html_table(headers: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table of text as HTML. A wide table scrolls by itself, by keyboard too."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in headers)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    start = '<div class="scroll" tabindex="0" role="region" aria-label="Table">'
    return f"{start}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def html_section(title: str, content: str, level: int = 2) -> str:
    """Return a heading of this level with the HTML below it."""
    return f"<section><h{level}>{escape(title)}</h{level}>{content}</section>"


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table: the first column left-aligned, all others right-aligned."""
    rule = ["---", *["---:"] * (len(headers) - 1)]
    return ["| " + " | ".join(map(_cell, row)) + " |" for row in [headers, rule, *rows]]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _text(value: object) -> str:
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
