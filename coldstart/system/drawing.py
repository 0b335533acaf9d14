"""Draw the timeline as bars of text: one axis for all tracks, no line longer than the width.

Launchers import this module only when they draw.
"""

from __future__ import annotations

import sys

from coldstart.system.timeline import Span, Timeline

MIN_WIDTH = 40


def draw(timeline: Timeline, width: int = 80, *, encoding: str | None = None) -> str:
    """Return bars by track as plain text, no line longer than `width` columns (at least MIN_WIDTH).

    Bars use block characters if `encoding` (default: stdout's) has them, ASCII otherwise. Without spans the text is empty.
    """
    spans = sorted(timeline.spans, key=lambda span: span.start_s)
    if not spans:
        return ""
    encoding = encoding or sys.stdout.encoding or "ascii"
    block, ellipsis = "█…" if "█…".encode(encoding, "replace").decode(encoding) == "█…" else "#~"
    label_width = min(max(len(span.name) + 2 for span in spans), max(width, MIN_WIDTH) // 3)
    bar_width = max(width, MIN_WIDTH) - label_width - 12
    total_s = max(span.end_s for span in spans) - timeline.origin_s

    def clip(text: str, columns: int) -> str:
        text = text.encode(encoding, "replace").decode(encoding)
        return text if len(text) <= columns else text[: columns - 1] + ellipsis

    def format_line(span: Span) -> str:
        scale = bar_width / total_s if total_s else 0.0
        left = min(int((span.start_s - timeline.origin_s) * scale), bar_width - 1)
        bar = " " * left + block * max(1, min(round(span.duration_s * scale), bar_width - left))
        label = clip("  " + span.name, label_width)
        return f"{label:{label_width}} {bar:{bar_width}} {span.duration_s:8.3f} s"

    lines = []
    for track in dict.fromkeys(span.track for span in spans):
        lines.append(clip(track, label_width + bar_width))
        lines.extend(format_line(span) for span in spans if span.track == track)
    lines.append(f"{'':{label_width}} 0{'':{bar_width - 1}} {total_s:8.3f} s")
    return "\n".join(lines)
