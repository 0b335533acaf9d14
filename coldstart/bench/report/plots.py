"""Plots of results with axes, units and hover values: ranges, stacks of phases, timelines, distributions, time series.

Library: Bokeh (BSD-3, NumFOCUS). Its pinned wheel includes its JavaScript (1.3 MB in a page); it is typed and has
logarithmic and named axes, legends that hide a series, and hover. The alternatives were uPlot (50 kB, but no wheel to
pin, and bars, ranges and hover text by hand), Plotly (one inlined file of 4.8 MB) and Altair (self-contained pages
only with a wheel of 33 MB).

Its import takes a second, so only modules that write pages import this module. All times are in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from bokeh.models import (
    BasicTicker,
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

# Okabe and Ito's palette: distinguishable with any colour vision. The last two are for "the rest".
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")
DASHES = ("solid", "dashed", "dotted", "dotdash")
ROW, FRAME, SERIES, LEGEND_ROW = 30, 90, 260, 26
"""Sizes in pixels: a row of bars, an axis with its labels, a plot over time, a row of a legend."""

SHORT = 18
"""Number of characters of a name up to which two names of a legend fit beside each other on a telephone."""

WIDE = 20.0
"""Ratio of the largest to the smallest value above which an axis is logarithmic."""

Numbers = Sequence[float] | np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class ValueRange:
    """A median with its range and its samples; `note` is shown beside the values."""

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
    """Return a plot with one row per entry: median, range as a whisker, samples as small marks; `label` names the axis."""
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
        Whisker(base="y", lower="low", upper="high", source=source, dimension="width", line_color="#808080")
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
    """Return a plot with one stack of phases (seconds by name) per entry, as shares of the entry.

    Starts differ by two orders of magnitude: on one axis of seconds only the slowest would show its phases. A phase has the
    same colour everywhere.
    """
    names = list(dict.fromkeys(name for phases in entries.values() for name in phases))
    total = {entry: sum(phases.values()) or 1.0 for entry, phases in entries.items()}
    rows = [f"{entry}: {total[entry]:.3g} s" for entry in entries]
    fig = _figure(
        height=FRAME + ROW * len(rows),
        y_range=FactorRange(factors=rows[::-1]),
        x_range=(0, 1),
        x_axis_label="share of the start",
    )
    fig.xaxis.formatter = NumeralTickFormatter(format="0 %")
    fig.xaxis.ticker = [0.0, 0.5, 1.0]
    end = [0.0] * len(rows)
    for number, name in enumerate(names):
        length = [phases.get(name, 0.0) for phases in entries.values()]
        begin = end
        end = [at + one / all_s for at, one, all_s in zip(begin, length, total.values(), strict=True)]
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
    """Return a plot of spans (`name`, `track`, `start_s`, `end_s`) in order of their start, coloured by track."""
    ordered = sorted(spans, key=lambda span: (float(span["start_s"]), -float(span["end_s"])))
    # Number the rows: a repeated name must not share a row.
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
    """Return a plot of cumulative distributions by name, from ordered pairs (value, share of all values up to it)."""
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
    _legend(fig)
    return fig


def over_time(
    series: Sequence[Series], label: str, *, time: str = "time (s)", may_be_log: bool = False
) -> Figure:
    """Return a plot of quantities with one unit over time, from zero unless logarithmic.

    `label` names quantity and unit.
    """
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
    _legend(fig)
    return fig


def colour(number: int) -> str:
    """Return a colour of the palette, which repeats."""
    return COLOURS[number % len(COLOURS)]


def _line(number: int) -> dict[str, str]:
    """Return colour and dash of a line; the dash changes each time the colours repeat."""
    return {"color": colour(number), "line_dash": DASHES[number // len(COLOURS) % len(DASHES)]}


def _fill(number: int) -> dict[str, Any]:
    """Return colour and hatch of a bar; the hatch changes each time the colours repeat."""
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
    fig.toolbar.logo = None  # it links to another site
    fig.toolbar.autohide = True
    fig.output_backend = "canvas"
    for axis, kind in ((fig.xaxis, "x_axis_type"), (fig.yaxis, "y_axis_type")):
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_font_size = "13px"
        axis.major_label_text_font_size = "12px"
        if given.get(kind) == "log":
            axis.formatter = PrintfTickFormatter(format="%.3g")
        elif not isinstance(given.get(kind.replace("axis_type", "range")), FactorRange):
            axis.ticker = BasicTicker(desired_num_ticks=4)  # more overlap on a telephone
    return fig


def _legend(fig: Figure) -> None:
    """Place the legend, whose entries hide and show series, below the plot, in columns that fit a narrow page."""
    if not fig.legend:
        return
    legend, names = fig.legend[0], [str(item.label) for item in fig.legend[0].items]
    fig.add_layout(legend, "below")
    legend.click_policy = "hide"
    legend.label_text_font_size = "11px"
    legend.orientation, legend.location = "vertical", "top_left"
    legend.ncols = 2 if max(map(len, names)) <= SHORT else 1
    legend.visible = len(names) > 1
    if legend.visible:
        fig.height += LEGEND_ROW * math.ceil(len(names) / legend.ncols) + 20


def _extent(values: Sequence[float]) -> tuple[float, float]:
    """Return the smallest positive and the largest of `values`; 1 if none is positive."""
    positive = [value for value in values if value > 0 and math.isfinite(value)]
    return (min(positive), max(positive)) if positive else (1.0, 1.0)


def _wide(low: float, high: float) -> bool:
    return high / low > WIDE


def _short(text: str) -> str:
    """Return a text that fits beside the bars of a telephone's page."""
    return text if len(text) <= 28 else text[:27] + "…"
