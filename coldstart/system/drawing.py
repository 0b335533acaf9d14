"""The timeline as bars of text: one axis for all tracks, no line longer than the width.

Blocks where the encoding has them, ASCII elsewhere. Imported only when something is drawn, so that launchers
do not pay for it.
"""

from __future__ import annotations

import sys

from coldstart.system.timeline import Span, Timeline

MIN_WIDTH = 40


def draw(timeline: Timeline, width: int = 80, *, encoding: str | None = None) -> str:
    """Bars by track, no line longer than `width` columns (at least MIN_WIDTH); plain text.

    Blocks where `encoding` (default: stdout's) has them, else ASCII. Empty text for no spans.
    """
    if not timeline.spans:
        return ""
    return _Drawing(timeline, max(width, MIN_WIDTH), encoding or sys.stdout.encoding or "ascii").text()


class _Drawing:
    """Layout: `label  bar  seconds`; the bar area shares one time axis over all tracks."""

    def __init__(self, timeline: Timeline, width: int, encoding: str) -> None:
        self.timeline = timeline
        self.block, self.ellipsis = ("█", "…") if _can_encode("█…", encoding) else ("#", "~")
        self.encoding = encoding
        self.origin_s = timeline.origin_s
        self.total_s = max(span.end_s for span in timeline.spans) - self.origin_s
        longest = max(len(span.name) + 2 for span in timeline.spans)
        self.label_width = min(longest, width // 3)
        self.bar_width = width - self.label_width - 12

    def text(self) -> str:
        tracks: dict[str, list[Span]] = {}
        for span in sorted(self.timeline.spans, key=lambda span: span.start_s):
            tracks.setdefault(span.track, []).append(span)
        lines = []
        for track, spans in tracks.items():
            lines.append(self._clip(track, self.label_width + self.bar_width))
            lines.extend(self._line(span) for span in spans)
        lines.append(f"{'':{self.label_width}} 0{'':{self.bar_width - 1}} {self.total_s:8.3f} s")
        return "\n".join(lines)

    def _line(self, span: Span) -> str:
        scale = self.bar_width / self.total_s if self.total_s else 0.0
        left = min(int((span.start_s - self.origin_s) * scale), self.bar_width - 1)
        length = max(1, min(round(span.duration_s * scale), self.bar_width - left))
        bar = " " * left + self.block * length
        label = self._clip("  " + span.name, self.label_width)
        return f"{label:{self.label_width}} {bar:{self.bar_width}} {span.duration_s:8.3f} s"

    def _clip(self, text: str, width: int) -> str:
        text = text.encode(self.encoding, "replace").decode(self.encoding)
        return text if len(text) <= width else text[: width - 1] + self.ellipsis


def _can_encode(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
