"""Plots of results: ranges, stacks of phases, timelines, distributions and time series, all with axes, units and hover values.

Library: Bokeh (BSD-3, NumFOCUS). Chosen over uPlot (50 kB, but no wheel of its own to pin, and bars, ranges and hover text by
hand), Plotly (one inlined file of 4.8 MB) and Altair (whose pages stand alone only with a wheel of 33 MB): a pinned wheel that
carries its own JavaScript (1.3 MB in a page), typed, with logarithmic and named axes, legends that hide a series, and hover.

Importing it takes a second: only what writes a page imports this module. Times in seconds throughout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from bokeh.models import (
    ColumnDataSource,
    DataRange1d,
    FactorRange,
    HoverTool,
    NumeralTickFormatter,
    PrintfTickFormatter,
    Range1d,
    Whisker,
)
from bokeh.plotting import figure as Figure

# Okabe and Ito's palette: told apart by readers with any colour vision. The last two stand for "the rest".
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")
DASHES = ("solid", "dashed", "dotted", "dotdash")
ROW, FRAME, SERIES = 30, 90, 260
"""Pixels: a row of bars, what an axis and its labels take, a plot over time."""

WIDE = 20.0
"""Values that lie further apart than this factor are shown on a logarithmic axis."""

Numbers = Sequence[float] | np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class ValueRange:
    """A median with its range and the samples behind it; `note` is shown beside the values."""

    label: str
    value: float
    low: float
    high: float
    samples: Sequence[float] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """One quantity over time; a `step` holds its value until the next point, otherwise points are joined."""

    name: str
    time_s: Numbers
    value: Numbers
    step: bool = True


def ranges(entries: Sequence[ValueRange], label: str, unit: str = "s") -> Figure:
    """One row per entry: its median, its range as a whisker, its samples as small marks; `label` is the axis's."""
    rows = [entry.label for entry in entries]
    low, high = _extent([v for e in entries for v in (e.low, e.high, *e.samples)])
    fig = _figure(
        height=FRAME + ROW * len(rows),
        x_axis_type="log" if _wide(low, high) else "linear",
        x_range=(low / 1.5, high * 1.5) if _wide(low, high) else (0, high * 1.08),
        y_range=FactorRange(factors=rows[::-1]),
        x_axis_label=f"{label} ({unit})",
    )
    colours = {label: colour(number) for number, label in enumerate(rows)}
    dots = [(e.label, value) for e in entries for value in e.samples]
    samples = ColumnDataSource({"y": [y for y, _ in dots], "x": [x for _, x in dots]})
    fig.scatter("x", "y", source=samples, size=5, color="#999999", alpha=0.7)
    source = ColumnDataSource(
        {
            "y": rows,
            "value": [e.value for e in entries],
            "low": [e.low for e in entries],
            "high": [e.high for e in entries],
            "note": [e.note for e in entries],
            "colour": [colours[e.label] for e in entries],
        }
    )
    fig.add_layout(
        Whisker(base="y", lower="low", upper="high", source=source, dimension="width", line_color="#333333")
    )
    medians = fig.scatter("value", "y", source=source, size=13, color="colour", marker="circle")
    shown = [
        ("", "@y"),
        ("median", f"@value{{0.000}} {unit}"),
        ("range", f"@low{{0.000}} to @high{{0.000}} {unit}"),
    ]
    fig.add_tools(HoverTool(renderers=[medians], tooltips=[*shown, ("", "@note")]))
    return fig


def stacks(entries: Mapping[str, Mapping[str, float]]) -> Figure:
    """One stack of phases (seconds by name) per entry; a phase has the same colour everywhere."""
    names = list(dict.fromkeys(name for phases in entries.values() for name in phases))
    rows = list(entries)
    total = max((sum(phases.values()) for phases in entries.values()), default=0.0)
    fig = _figure(
        height=max(FRAME + ROW * len(rows), 60 + 22 * len(names)),
        y_range=FactorRange(factors=rows[::-1]),
        x_range=(0, total * 1.03 or 1.0),
        x_axis_label="time (s)",
    )
    left = dict.fromkeys(rows, 0.0)
    for number, name in enumerate(names):
        length = [entries[row].get(name, 0.0) for row in rows]
        begin = [left[row] for row in rows]
        end = [a + b for a, b in zip(begin, length, strict=True)]
        left = dict(zip(rows, end, strict=True))
        columns = {"y": rows, "left": begin, "right": end, "phase": [name] * len(rows), "length": length}
        bars = fig.hbar(
            "y", left="left", right="right", height=0.7, source=ColumnDataSource(columns), legend_label=_short(name),
            **_fill(number),
        )  # fmt: skip
        shown = [("", "@y"), ("phase", "@phase"), ("length", "@length{0.000} s")]
        fig.add_tools(HoverTool(renderers=[bars], tooltips=shown))
    _legend(fig)
    return fig


def timeline(spans: Sequence[Mapping[str, Any]]) -> Figure:
    """Spans (`name`, `track`, `start_s`, `end_s`) in order of their begin, coloured by track."""
    ordered = sorted(spans, key=lambda span: (float(span["start_s"]), -float(span["end_s"])))
    # A name that comes twice gets two rows.
    rows = [f"{number + 1}. {_short(str(span['name']))}" for number, span in enumerate(ordered)]
    end = max((float(span["end_s"]) for span in ordered), default=1.0)
    fig = _figure(
        height=FRAME + 20 * len(rows),
        y_range=FactorRange(factors=rows[::-1]),
        x_range=(0, end * 1.02),
        x_axis_label="time since the launch (s)",
    )
    for number, track in enumerate(dict.fromkeys(str(span["track"]) for span in ordered)):
        chosen = [(row, span) for row, span in zip(rows, ordered, strict=True) if str(span["track"]) == track]
        source = ColumnDataSource(
            {
                "y": [row for row, _ in chosen],
                "name": [str(span["name"]) for _, span in chosen],
                "start": [float(span["start_s"]) for _, span in chosen],
                "end": [float(span["end_s"]) for _, span in chosen],
                "length": [float(span["end_s"]) - float(span["start_s"]) for _, span in chosen],
            }
        )
        bars = fig.hbar(
            "y", left="start", right="end", height=0.7, source=source, legend_label=track,
            fill_color=colour(number), line_color=colour(number),
        )  # fmt: skip
        shown = [
            (track, "@name"),
            ("from", "@start{0.000} s"),
            ("to", "@end{0.000} s"),
            ("length", "@length{0.000} s"),
        ]
        fig.add_tools(HoverTool(renderers=[bars], tooltips=shown))
    _legend(fig)
    return fig


def distributions(values: Mapping[str, Sequence[tuple[float, float]]], label: str, unit: str = "s") -> Figure:
    """A cumulative distribution per name, from (value, share of all at most that) in order."""
    low, high = _extent([value for points in values.values() for value, _ in points])
    wide = _wide(low, high)
    fig = _figure(
        height=SERIES,
        x_axis_type="log" if wide else "linear",
        x_range=(low / 1.2, high * 1.2) if wide else (0, high * 1.02),
        y_range=(0, 1.02),
        x_axis_label=f"{label} ({unit})",
        y_axis_label="share of requests",
    )
    fig.yaxis.formatter = NumeralTickFormatter(format="0 %")
    for number, (name, points) in enumerate(values.items()):
        kept = [(value, share) for value, share in points if value > 0 or not wide]
        source = ColumnDataSource({"x": [x for x, _ in kept], "y": [y for _, y in kept]})
        line = fig.line("x", "y", source=source, legend_label=name, line_width=2, **_line(number))
        shown = [("", name), ("at most", f"@x{{0.0000}} {unit}"), ("share", "@y{0.0 %}")]
        fig.add_tools(HoverTool(renderers=[line], tooltips=shown, mode="hline"))
    _legend(fig, "above")
    return fig


def over_time(
    series: Sequence[Series], label: str, *, time: str = "time (s)", may_be_log: bool = False
) -> Figure:
    """Quantities of one unit over time, from zero unless logarithmic; `label` names quantity and unit."""
    low, high = _extent([float(value) for one in series for value in one.value] if may_be_log else [])
    wide = _wide(low, high)
    fig = _figure(
        height=SERIES, x_axis_label=time, y_axis_label=label, y_axis_type="log" if wide else "linear"
    )
    if wide:
        fig.y_range = Range1d(low / 1.5, high * 1.5)
    else:
        fig.y_range = DataRange1d(start=0)
    for number, one in enumerate(series):
        source = ColumnDataSource({"x": np.asarray(one.time_s), "y": np.asarray(one.value)})
        drawn: dict[str, Any] = {"legend_label": one.name, "line_width": 1.5, **_line(number)}
        line = (
            fig.step("x", "y", source=source, mode="after", **drawn)
            if one.step
            else fig.line("x", "y", source=source, **drawn)
        )
        shown = [("", one.name), (time, "@x{0.[00]}"), (label, "@y{0,0.[000]}")]
        fig.add_tools(HoverTool(renderers=[line], tooltips=shown, mode="vline"))
    _legend(fig, "above")
    return fig


def colour(number: int) -> str:
    """The palette, repeated."""
    return COLOURS[number % len(COLOURS)]


def _line(number: int) -> dict[str, str]:
    """Colour, and another dash each time the colours are through."""
    return {"color": colour(number), "line_dash": DASHES[number // len(COLOURS) % len(DASHES)]}


def _fill(number: int) -> dict[str, Any]:
    """Colour, and a hatch from the second time on."""
    hatch = (None, "/", "\\", "x")[number // len(COLOURS) % 4]
    return {"fill_color": colour(number), "line_color": "white", "hatch_pattern": hatch, "hatch_alpha": 0.5}


def _figure(**given: Any) -> Figure:
    fig = Figure(
        sizing_mode="stretch_width",
        tools="xpan,xwheel_zoom,box_zoom,reset,save",
        active_scroll=None,
        toolbar_location="above",
        min_border_left=80,
        min_border_right=20,
        **given,
    )
    fig.toolbar.logo = None  # a link elsewhere
    fig.toolbar.autohide = True
    fig.output_backend = "canvas"
    for axis, kind in ((fig.xaxis, "x_axis_type"), (fig.yaxis, "y_axis_type")):
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_font_size = "13px"
        axis.major_label_text_font_size = "12px"
        if given.get(kind) == "log":
            axis.formatter = PrintfTickFormatter(format="%.3g")
    return fig


def _legend(fig: Figure, place: str = "right") -> None:
    """Beside the plot, whose series it hides and shows again; above it where plots are to keep one width."""
    if not fig.legend:
        return
    legend = fig.legend[0]
    fig.add_layout(legend, place)
    legend.click_policy = "hide"
    legend.label_text_font_size = "12px"
    if place == "above":
        legend.orientation = "horizontal"
        legend.border_line_color = None
        legend.visible = len(legend.items) > 1


def _extent(values: Sequence[float]) -> tuple[float, float]:
    """The least above zero and the greatest of `values`, 1 where there is none."""
    positive = [value for value in values if value > 0 and math.isfinite(value)]
    return (min(positive), max(positive)) if positive else (1.0, 1.0)


def _wide(low: float, high: float) -> bool:
    return high / low > WIDE


def _short(text: str) -> str:
    return text if len(text) <= 40 else text[:39] + "…"
