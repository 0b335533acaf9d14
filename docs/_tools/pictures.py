"""Take the pictures of the pages in docs/images: the report of a measurement, the waterfall of a start, and a host's page.

The first two show the committed result of `start/cold_start`. The third needs a running host, given by its URL.
Needs Chromium (tests/tools/fetch-chromium.sh). Run: python docs/_tools/pictures.py [URL]
"""

from __future__ import annotations

import base64
import json
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from tools import chromium  # noqa: E402 - the tests' tools are not installed

from coldstart.bench import starts  # noqa: E402

IMAGES = ROOT / "docs" / "images"
RESULT = ROOT / "benchmarks" / "results" / "cold-start-cpu.json"
START = "[...document.querySelectorAll('section')].find(one => one.innerText.startsWith('Timeline of fresh'))"
WIDTH, HEIGHT, MARGIN, SETTLE_S = 1000, 860, 12, 2.0


def main() -> None:
    """Write each picture in a light and a dark color scheme."""
    python = chromium.find_python()
    if python is None:
        sys.exit("error: there is no Chromium\nhint: tests/tools/fetch-chromium.sh")
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as home, chromium.browser(python) as page:
        report = Path(home) / "report.html"
        report.write_text(
            starts.build_report(json.loads(RESULT.read_text(encoding="utf-8"))).render("html"),
            encoding="utf-8",
        )
        for scheme in ("light", "dark"):
            page.show(width=WIDTH, height=HEIGHT, dark=scheme == "dark")
            page.open(f"file://{report}")
            take(page, "document.querySelector('main')", IMAGES / f"bench-{scheme}.png")
            take(page, START, IMAGES / f"waterfall-{scheme}.png")
            if len(sys.argv) > 1:
                page.open(f"{sys.argv[1]}/ui")
                page.wait_until("document.querySelectorAll('.phase').length")
                time.sleep(SETTLE_S)  # the page reads the status every second
                take(page, "document.body", IMAGES / f"host-{scheme}.png")


def take(page: chromium.Page, element: str, file: Path) -> None:
    """Save an element of the page, at most HEIGHT pixels of it, with a margin."""
    box = page.evaluate(
        f"(() => {{ const r = {element}.getBoundingClientRect(); return [r.top + scrollY, r.height]; }})()"
    )
    top = max(0.0, box[0] - MARGIN)
    clip = {"x": 0, "y": top, "width": WIDTH, "height": min(box[1] + 2 * MARGIN, HEIGHT), "scale": 1}
    taken = page.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
    file.write_bytes(base64.b64decode(taken["data"]))


if __name__ == "__main__":
    main()
