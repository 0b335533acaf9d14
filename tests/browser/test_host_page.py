"""The host's page at /ui in a real browser: readable at each width, and its buttons do what they say."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hosted import NAME, Served, build_status
from tools.chromium import Page
from tools.raw_server import Asked, answer, answering

from coldstart.host.live import app

_TOO_WIDE = """(() => {
  const width = document.documentElement.clientWidth;
  const clips = one => ["auto", "scroll", "hidden"].includes(getComputedStyle(one).overflowX);
  const scrolls = one => one && (clips(one) || scrolls(one.parentElement));
  return [...document.body.querySelectorAll("*")]
    .filter(one => one.getBoundingClientRect().right > width + 1 && !scrolls(one.parentElement))
    .map(one => one.outerHTML.slice(0, 120));
})()"""
_BARRIERS = """axe.run(document, {resultTypes: ["violations"]}).then(found => found.violations
  .filter(one => ["serious", "critical"].includes(one.impact))
  .map(one => one.id + ": " + one.nodes.map(node => node.html.slice(0, 160)).join(" | ")))"""
SPANS = [
    {"name": "import <b>vLLM</b>", "track": "server", "start_s": 0.0, "end_s": 1.0},
    {"name": "read the plan", "track": "server", "start_s": 0.25, "end_s": 0.5},
    {"name": "load weights", "track": "engine", "start_s": 1.0, "end_s": 2.0},
]
METRICS = "".join(
    f'vllm:inter_token_latency_seconds_bucket{{engine="0",le="{le}",model="b"}} {count}\n'
    for le, count in (("0.01", 0.0), ("0.02", 100.0), ("+Inf", 100.0))
)


def _respond(connection: Any, asked: Asked) -> None:
    status = build_status()
    status["models"][0]["last_start"]["spans"] = SPANS
    status["host"]["runtime_template_error"] = "no <i>room</i>"
    status["host"]["client_keys_error"] = "no <i>file</i>"
    known = {
        "/ui": ("text/html", app.read_status_page()[0].decode),
        "/status": ("application/json", lambda: json.dumps(status | {"time_unix_s": time.time()})),
        "/metrics": ("text/plain", lambda: METRICS),
    }
    kind, make = known.get(asked.path, ("text/plain", lambda: ""))
    answer(connection, 200 if asked.path in known else 404, {"Content-Type": kind}, make().encode())


@pytest.fixture
def host_url() -> Iterator[str]:
    with answering(_respond) as server:
        yield server.url


def test_page_fits_and_bars_nobody_at_any_width_and_scheme(shown: Page, axe: str, host_url: str) -> None:
    shown.open(f"{host_url}/ui")
    shown.wait_until(
        "Object.keys(adding).length === 4 && document.querySelectorAll('.charts svg path').length === 8"
    )
    too_wide = shown.evaluate(_TOO_WIDE)
    assert too_wide == [], too_wide
    assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page is too wide"
    shown.evaluate(axe + ";true")
    barriers = shown.evaluate(_BARRIERS)
    assert barriers == [], barriers
    errors = shown.errors()
    assert errors == [], errors


def test_model_of_a_row_can_be_read_when_the_table_is_scrolled(shown: Page, host_url: str) -> None:
    shown.open(f"{host_url}/ui")
    shown.wait_until("document.querySelectorAll('#models tr').length === 2")
    shown.evaluate("document.querySelector('.scroll').scrollLeft = 9999")
    assert shown.evaluate("document.querySelector('.scroll').scrollLeft") > 0
    region, name, prewarm = shown.evaluate(
        """(() => {
          const row = document.querySelector("#models tr"), cells = [row.cells[0], row.cells[row.cells.length - 1]];
          return [row.closest(".scroll"), ...cells].map(one => one.getBoundingClientRect().toJSON());
        })()"""
    )
    assert name["left"] == region["left"] and name["right"] < prewarm["left"] < prewarm["right"]
    assert abs(prewarm["right"] - region["right"]) < 1


def test_page_shows_the_status_as_text(page: Page, host_url: str) -> None:
    page.open(f"{host_url}/ui")
    page.wait_until("document.querySelectorAll('#models tr').length === 2")
    rows = page.evaluate("[...document.querySelectorAll('#models tr')].map(row => row.innerText)")
    assert rows[0].startswith(NAME) and "ready" in rows[0] and "10.00 GiB\t9216.0 MiB" in rows[0]
    assert rows[0].endswith("(0 8 * * 1-5)") and "2001" in rows[0] and rows[1].endswith("–")
    assert "failed" in rows[1] and "15.0 ms / 19.5 ms" in rows[1]
    errors = page.evaluate("document.getElementById('errors').innerText")
    assert errors.splitlines() == [
        "b: it fell <i>over</i>",
        "client keys not applied, the former ones remain: no <i>file</i>",
        "no runtime template: no <i>room</i>",
    ]


def test_phases_are_a_waterfall_from_begin_to_end(page: Page, host_url: str) -> None:
    page.open(f"{host_url}/ui")
    page.wait_until("document.querySelectorAll('.phase').length === 3")
    bars = page.evaluate(
        "[...document.querySelectorAll('.phase i')].map(bar => [bar.style.left, bar.style.width])"
    )
    assert bars == [["0%", "50%"], ["12.5%", "12.5%"], ["50%", "50%"]]
    assert page.evaluate("document.querySelector('.phase span').textContent") == "import <b>vLLM</b>"


@pytest.fixture
def served(tmp_path: Path, runtime_home: Path, monkeypatch: pytest.MonkeyPatch) -> Served:
    return Served(tmp_path, monkeypatch)


def test_a_model_is_loaded_asked_and_unloaded_by_keyboard(page: Page, served: Served) -> None:
    def use(url: str) -> None:
        page.open(f"{url}/ui")
        page.wait_until("document.querySelectorAll('#models tr').length === 2")
        _press(page, "Load a")
        page.wait_until("document.querySelector('#models .ready')")
        page.evaluate("document.getElementById('which').value = 'a'")
        page.evaluate("document.querySelector('#try button').click()")
        page.wait_until("document.getElementById('said').textContent.length > 0")
        page.wait_until("document.getElementById('pace').textContent.startsWith('first token after')")
        _press(page, "Unload a")
        page.wait_until("""document.querySelector('[aria-label="Load a"]')""")
        assert page.errors() == []

    async def work(served: Served) -> None:
        await asyncio.to_thread(use, served.urls[0])
        os.kill(os.getpid(), signal.SIGTERM)

    assert served.run(work) == 143


def _press(page: Page, label: str) -> None:
    """Move the focus by Tab to the button with this label, and press Enter."""
    for _ in range(40):
        page.press("Tab", 9)
        if page.evaluate("document.activeElement.getAttribute('aria-label')") == label:
            page.press("Enter", 13, "\r")
            return
    raise AssertionError(f"Tab does not reach {label}")
