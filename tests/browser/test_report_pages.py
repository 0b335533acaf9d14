"""Pages of results in a real browser: every plot is drawn, at each width and in both colour schemes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tools import page_checks
from tools.chromium import Page

from coldstart.bench.report import starts
from coldstart.validate.launchers import console

ROOT = Path(__file__).parents[2]
PROFILE = {"prefill": [[1, 0.02], [2048, 0.9]], "decode": [[1, 0.02], [64, 0.06]]}
HOST = """memory = "15GiB"
policy = "lru"
[models.a]
memory = "10GiB"
start_s = 2.0
[models.b]
memory = "10GiB"
start_s = 3.0
"""
PLOTS = {"bench": 3 + 6, "replay": 3 + 4, "host": 3 + 5}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with a page of a measurement, of a simulated replay, and of a simulated host."""
    made = tmp_path_factory.mktemp("pages")
    document = json.loads((ROOT / "benchmarks" / "results" / "cold-start-cpu.json").read_text())
    document["model"] = "$$x^2$$ <b>"
    (made / "bench.html").write_text(starts.report(document).render("html"), encoding="utf-8")
    (made / "profile.json").write_text(json.dumps(PROFILE))
    (made / "host.toml").write_text(HOST)
    rows = [f"{0.7 * number},{'ab'[number // 3 % 2]},100,{20 + number}" for number in range(60)]
    (made / "trace.csv").write_text("\n".join(["time,model,prompt,output", *rows]))
    replay = ["trace-replay", "trace.csv", "--trace-format", "csv", "--simulate", "--profile", "profile.json"]
    _run(made, *replay, "--export", "html=replay.html")
    _run(made, *replay, "--host", "host.toml", "--export", "html=host.html")
    return made


def _run(directory: Path, *arguments: str) -> None:
    columns = "time=time,model=model,prompt=prompt,output=output"
    command = [*console(), *arguments, "--columns", columns]
    done = subprocess.run(command, cwd=directory, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", PLOTS)
def test_page_fits_and_bars_nobody_at_any_width_and_scheme(
    name: str, shown: Page, axe: str, pages: Path
) -> None:
    shown.open(f"file://{pages / name}.html")
    shown.wait_until(f"document.querySelectorAll('svg').length === {PLOTS[name]}")
    page_checks.check(shown, axe)


def test_page_of_a_dark_scheme_has_light_text_in_its_plots(page: Page, pages: Path) -> None:
    page.show(width=1280, dark=True)
    page.open(f"file://{pages / 'bench.html'}")
    colours = "[...document.querySelectorAll('svg text')].map(one => getComputedStyle(one).fill)"
    assert set(page.evaluate(colours)) == {"rgb(230, 230, 230)"}
    page.show(width=1280, dark=False)
    page.wait_until(f"{colours}.every(one => one === 'rgb(34, 34, 34)')")
