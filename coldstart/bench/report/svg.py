"""Plots as inline SVG: rows of bars or ranges, and lines. A mark has its values as title, which browsers show as a hint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

# Okabe and Ito's palette: distinguishable with any colour vision. The last is for "the rest".
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800", "#999999")
WIDTH, MARGIN, RIGHT, ROW, TALL, LETTER = 520, 48, 12, 20, 170, 6.2
"""Sizes in units of the drawing: width, margins, height of a row of bars and of an area of lines, width of a letter."""

WIDE = 20.0
"""Ratio of the largest to the smallest value above which an axis is logarithmic."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class _Scale:
    """Map of values from `low` to `high` onto positions from `begin` to `end`."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    @classmethod
    def over(cls, values: Iterable[float], begin: float, end: float, *, may_be_log: bool = False) -> _Scale:
        """Create a scale from zero, or a logarithmic one of values far apart."""
        positive = [value for value in values if value > 0 and math.isfinite(value)]
        low, high = (min(positive), max(positive)) if positive else (1.0, 1.0)
        log = may_be_log and high / low > WIDE
        return cls(low / 1.5, high * 1.5, begin, end, log) if log else cls(0.0, high * 1.05, begin, end)

    def at(self, value: float) -> float:
        """Return the position of a value."""
        given = value, self.low, self.high
        value, low, high = (math.log(max(one, self.low)) for one in given) if self.log else given
        return round(self.begin + (value - low) / (high - low) * (self.end - self.begin), 1)

    def ticks(self) -> list[float]:
        """Return at most five round values."""
        if self.log:
            powers = range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
            return [10.0**power for power in powers][:: len(powers) // 6 + 1]
        step = 10.0 ** math.floor(math.log10(self.high / 4))
        step *= next(factor for factor in (1, 2, 5, 10) if self.high / (step * factor) <= 5)
        return [step * number for number in range(math.floor(self.high / step) + 1)]


def ranges(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a plot with one row per entry: a bar from `min` to `max`, and its `median` as a circle, in seconds."""
    ends = [one[end] for one in entries.values() for end in ("min", "max")]
    x, marks = _Scale.over(ends, _left(entries), WIDTH - RIGHT, may_be_log=True), []
    for number, (name, one) in enumerate(entries.items()):
        y, low, high = ROW * (number + 0.5), one["min"], one["max"]
        text = f"{name}: median {one['median']:.3f} s, {low:.3f} to {high:.3f} s"
        bar = _tag("line", x1=x.at(low), x2=x.at(high), y1=y, y2=y, stroke="#808080", stroke_width=3)
        dot = _tag("circle", cx=x.at(one["median"]), cy=y, r=5, fill=colour(number))
        marks.append(_tag("g", _title(text) + bar + dot))
    return _rows([*entries], marks, x, "from launch to the first token (s)")


def timeline(spans: Sequence[Mapping[str, Any]]) -> str:
    """Return a plot of spans (`name`, `track`, `start_s`, `end_s`) in order of their start, coloured by track."""
    ordered = sorted(spans, key=lambda span: float(span["start_s"]))
    tracks = dict.fromkeys(str(span["track"]) for span in ordered)
    colours = {track: colour(number) for number, track in enumerate(tracks)}
    names = [f"{number + 1}. {span['name']}" for number, span in enumerate(ordered)]
    latest = max((float(span["end_s"]) for span in ordered), default=1.0)
    x, marks = _Scale(0.0, latest or 1.0, _left(names), WIDTH - RIGHT), []
    for row, span in enumerate(ordered):
        begin, end, track = float(span["start_s"]), float(span["end_s"]), str(span["track"])
        place = {"x": x.at(begin), "width": round(max(1.0, x.at(end) - x.at(begin)), 1)}
        text = _title(f"{span['name']} ({track}): {begin:.3f} to {end:.3f} s")
        marks.append(_tag("rect", text, **place, y=ROW * row + 3, height=ROW - 6, fill=colours[track]))
    return _rows(names, marks, x, "time since the launch (s)", colours)


def lines(series: Mapping[str, Iterable[Point]], x_label: str, y_label: str, *, step: bool = False) -> str:
    """Return a plot of lines from points (x, y), by name. A `step` holds its value until the next point."""
    points = {name: [(float(a), float(b)) for a, b in given] for name, given in series.items()}
    every = [one for found in points.values() for one in found]
    x = _Scale.over([a for a, _ in every], MARGIN, WIDTH - RIGHT, may_be_log=not step)
    y = _Scale.over([b for _, b in every], TALL, 6.0, may_be_log=not step)
    marks = [_tag("text", escape(y_label), class_="label", x=0, y=-2)]
    for tick in y.ticks():
        marks += [
            _tag("line", class_="grid", x1=MARGIN, x2=WIDTH - RIGHT, y1=y.at(tick), y2=y.at(tick)),
            _text("y", MARGIN - 4, y.at(tick) + 4, f"{tick:g}"),
        ]
    for number, (name, found) in enumerate(points.items()):
        places = [(x.at(a), y.at(b)) for a, b in found]
        path = "".join(f"H{a}V{b}" if step else f"L{a} {b}" for a, b in places[1:])
        begin = "M{} {}".format(*places[0]) if places else ""
        drawn = {"fill": "none", "stroke": colour(number), "stroke_width": 1.5}
        marks.append(_tag("path", _title(name), d=begin + path, **drawn))
    return _draw(TALL, marks, x, x_label, {name: colour(number) for number, name in enumerate(points)})


def colour(number: int) -> str:
    """Return a colour of the palette, which repeats."""
    return COLOURS[number % len(COLOURS)]


def _rows(
    names: Sequence[str], marks: Sequence[str], x: _Scale, label: str, legend: Mapping[str, str] | None = None
) -> str:
    labels = [
        _text("y", x.begin - 4, ROW * (number + 0.5) + 4, _short(name)) for number, name in enumerate(names)
    ]
    return _draw(ROW * len(names), [*labels, *marks], x, label, legend or {})


def _draw(height: float, marks: Sequence[str], x: _Scale, label: str, legend: Mapping[str, str]) -> str:
    axis = [_text("x label", (x.begin + x.end) / 2, height + 30, label)]
    for tick in x.ticks():
        axis.append(_tag("line", class_="grid", x1=x.at(tick), x2=x.at(tick), y1=0, y2=height))
        axis.append(_text("x", x.at(tick), height + 14, f"{tick:g}"))
    size = f"0 -12 {WIDTH} {height + 48}"
    drawn = _tag("svg", "".join([*axis, *marks]), viewBox=size, role="img", aria_label=label)
    keys = [
        _tag("span", _tag("i", style=f"background:{fill}") + escape(name)) for name, fill in legend.items()
    ]
    return _tag("figure", drawn + (_tag("figcaption", "".join(keys)) if len(keys) > 1 else ""))


def _tag(name: str, content: str = "", **given: object) -> str:
    attributes = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"' for key, value in given.items()
    )
    return f"<{name}{attributes}>{content}</{name}>"


def _title(text: str) -> str:
    return _tag("title", escape(text.strip()))


def _text(kind: str, x: float, y: float, text: str) -> str:
    return _tag("text", escape(text), class_=kind, x=round(x, 1), y=round(y, 1))


def _left(names: Iterable[str]) -> float:
    return 8 + LETTER * max((len(_short(name)) for name in names), default=0)


def _short(text: str) -> str:
    """Return a text that fits beside the bars."""
    return text if len(text) <= 28 else text[:27] + "…"
