"""Plots as SVG text: horizontal bars with their spread, stacks of phases, a timeline.

All plots share one layout: labels to the left, one linear axis of seconds from zero, so that lengths compare.
Every text is escaped; nothing refers to anything outside the picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, LABEL, VALUE, ROW = 860, 190, 130, 26
PLOT = WIDTH - LABEL - VALUE
# Okabe and Ito's palette: told apart by readers with any colour vision.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar in seconds with its range, and the text beside it."""

    label: str
    value: float
    low: float
    high: float
    note: str


@dataclass
class _Canvas:
    """Collects the elements of one picture whose axis ends at `total_s`."""

    total_s: float
    elements: list[str] = field(default_factory=list)
    rows: int = 0

    def x(self, seconds: float) -> float:
        return LABEL + PLOT * min(max(seconds / self.total_s, 0.0), 1.0) if self.total_s else LABEL

    def label(self, text: str, note: str = "") -> float:
        top = self.rows * ROW + 6
        self.rows += 1
        self._text(LABEL - 8, top, text, "end")
        self._text(WIDTH - VALUE + 8, top, note, "start")
        return top

    def bar(self, top: float, start_s: float, end_s: float, colour: str, title: str) -> None:
        left = self.x(start_s)
        width = max(self.x(end_s) - left, 1.0)
        self.elements.append(
            f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{ROW - 8}" fill="{colour}">'
            f"<title>{escape(title)}</title></rect>"
        )

    def whisker(self, top: float, low_s: float, high_s: float) -> None:
        middle, low, high = top + (ROW - 8) / 2, self.x(low_s), self.x(high_s)
        caps = f"M{low:.1f} {middle - 4}v8M{high:.1f} {middle - 4}v8"
        self.elements.append(f'<path class="whisker" d="M{low:.1f} {middle}H{high:.1f}{caps}"/>')

    def svg(self, title: str) -> str:
        self._axis()
        height = self.rows * ROW + 30
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
            f"<title>{escape(title)}</title>{''.join(self.elements)}</svg>"
        )

    def _axis(self) -> None:
        y = self.rows * ROW + 6
        self.elements.append(f'<path class="axis" d="M{LABEL} {y}H{LABEL + PLOT}"/>')
        for seconds in (0.0, self.total_s / 2, self.total_s):
            self._text(self.x(seconds), y + 4, f"{seconds:.3g} s", "middle")

    def _text(self, x: float, top: float, text: str, anchor: str) -> None:
        if text:
            y = top + 13
            self.elements.append(f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>')


def bars(title: str, entries: Sequence[Bar]) -> str:
    """One bar per entry, its range as a whisker."""
    canvas = _Canvas(max((entry.high for entry in entries), default=0.0))
    for number, entry in enumerate(entries):
        top = canvas.label(entry.label, entry.note)
        canvas.bar(top, 0.0, entry.value, colour(number), f"{entry.label}: {entry.note}")
        canvas.whisker(top, entry.low, entry.high)
    return canvas.svg(title)


def stacks(title: str, entries: Mapping[str, Mapping[str, float]]) -> str:
    """One stack of phases (seconds by name) per entry; a phase has the same colour everywhere."""
    names = list(dict.fromkeys(name for phases in entries.values() for name in phases))
    canvas = _Canvas(max((sum(phases.values()) for phases in entries.values()), default=0.0))
    for label, phases in entries.items():
        top, at_s = canvas.label(label, f"{sum(phases.values()):.2f} s"), 0.0
        for name, length_s in phases.items():
            fill = colour(names.index(name))
            canvas.bar(top, at_s, at_s + length_s, fill, f"{label}, {name}: {length_s:.3f} s")
            at_s += length_s
    return canvas.svg(title) + _legend(names)


def timeline(title: str, spans: Sequence[Mapping[str, object]]) -> str:
    """Spans (`name`, `track`, `start_s`, `end_s` as in a bench document), coloured by track."""
    tracks = list(dict.fromkeys(str(span["track"]) for span in spans))
    times = [(_seconds(span["start_s"]), _seconds(span["end_s"])) for span in spans]
    canvas = _Canvas(max((end for _, end in times), default=0.0))
    for span, (start_s, end_s) in sorted(zip(spans, times, strict=True), key=lambda pair: pair[1]):
        name, track = str(span["name"]), str(span["track"])
        top = canvas.label(name[:28], f"{end_s - start_s:.3f} s")
        canvas.bar(top, start_s, end_s, colour(tracks.index(track)), f"{track}: {name}")
    return canvas.svg(title) + _legend(tracks)


def colour(number: int) -> str:
    """The palette, repeated."""
    return COLOURS[number % len(COLOURS)]


def _legend(names: Sequence[str]) -> str:
    items = (
        f'<li><span style="background:{colour(number)}"></span>{escape(name)}</li>'
        for number, name in enumerate(names)
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _seconds(value: object) -> float:
    if not isinstance(value, int | float):
        raise ValueError(f"a time is a number of seconds, not {value!r}")
    return float(value)
