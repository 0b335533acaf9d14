"""A replay as an HTML page: the table, and a CDF per metric as inline SVG.

Invariant: every curve rises from 0 to 1 and its x axis starts at 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from coldstart.measure.replay.metrics import percentile
from coldstart.measure.replay.render import LABELS, MARKS, rows
from coldstart.measure.replay.store import METRICS, RecordStore
from coldstart.measure.report.page import page as html
from coldstart.measure.report.page import section, table

WIDTH, HEIGHT, POINTS = 420, 220, 100
COLORS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700")

Runs = Mapping[str, RecordStore]


def page(title: str, summaries: Mapping[str, Mapping[str, object]], runs: Runs) -> str:
    """Tables and CDFs of one or more named runs over the same axes."""
    tables = [section(name, table(("seconds", *MARKS), rows(found))) for name, found in summaries.items()]
    return html(title, *tables, section("Distributions", "".join(_figure(name, runs) for name in METRICS)))


def _figure(metric: str, runs: Runs) -> str:
    values = {name: found for name, records in runs.items() if (found := records.column(metric))}
    right = max((percentile(found, 99) for found in values.values()), default=0.0)
    if right <= 0:
        return ""
    curves = "".join(_curve(found, right, COLORS[i % len(COLORS)]) for i, found in enumerate(values.values()))
    names = " ".join(
        f'<tspan fill="{COLORS[i % len(COLORS)]}">{escape(name)}</tspan>' for i, name in enumerate(values)
    )
    return (
        f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img">'
        f'<path d="M40 10V190H410" fill="none" stroke="#888"/>{curves}'
        f'<text x="40" y="206">0</text><text x="410" y="206" text-anchor="end">{right:.3g} s (p99)</text>'
        f'<text x="36" y="16" text-anchor="end">1</text>'
        f'<text x="225" y="206" text-anchor="middle">{names}</text>'
        f"</svg><figcaption>{escape(LABELS[metric])}</figcaption></figure>"
    )


def _curve(ordered: Sequence[float], right: float, color: str) -> str:
    marks = [(percentile(ordered, 100 * i / POINTS), i / POINTS) for i in range(POINTS + 1)]
    points = " ".join(f"{40 + 370 * min(x / right, 1):.1f},{190 - 180 * y:.1f}" for x, y in marks)
    return f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>'
