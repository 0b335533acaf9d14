"""The page at /ui: alone, open without the key, and drawn by a browser from a status of the real schema."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.testclient import TestClient
from support import pages

from coldstart.host import status
from coldstart.host.core import Core
from coldstart.host.endpoint import GatewayEndpoint
from coldstart.host.events import Arrived, Ended, Failed, Started
from coldstart.host.live import ui
from coldstart.host.live.app import Gateway
from coldstart.host.live.front import Front
from coldstart.host.specification import HostSettings, ModelSpec
from coldstart.host.status import HostFacts, LastStart

NAME = "org/<b>a</b> $$x$$"


def _status() -> dict[str, Any]:
    """One model that serves, one that failed."""
    core = Core(
        [ModelSpec.simple(NAME, 10 << 30, 5.0), ModelSpec.simple("b", 1 << 30, 7.0)],
        HostSettings(memory=15 << 30, policy="lru"),
    )
    facts = HostFacts(url="http://127.0.0.1:8000", pid=7, version="1.2.3")
    core.handle(Arrived("1", NAME), 2.0)
    core.handle(Started(NAME, 3.0, 10 << 30), 5.0)
    facts.get_model(NAME).last_start = LastStart(
        1e9, "snapshot", 3.25, {"import </script>": 1.0, "load weights": 2.0}
    )
    core.handle(Arrived("2", "b"), 5.5)
    core.handle(Ended("1"), 6.0)
    core.handle(Failed("b", "it fell <i>over</i>"), 7.0)
    return status.document(core, facts, 8.0, 1e9)


class _Host(BaseHTTPRequestHandler):
    """Says the page and a status, and notes what else is asked of it."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        body = {"/ui": ui.page, "/status": lambda: json.dumps(_status())}.get(self.path, str)().encode()
        self.send_response(200 if body else 404)
        self.send_header("Content-Type", "text/html" if self.path == "/ui" else "application/json")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None: ...


@contextmanager
def _running() -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Host", (_Host,), {"asked": asked}))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/ui", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_the_page_stands_alone_and_asks_its_own_host_only() -> None:
    pages.check(ui.page())
    assert "connect-src 'self'" in ui.page() and "/*library*/" not in ui.page()
    assert "innerHTML" not in ui.page().rpartition("</script>")[0].rpartition("<script>")[2]


def test_it_is_there_without_the_key_that_the_status_asks_for() -> None:
    front = cast("Front", SimpleNamespace(status=_status))
    endpoint = GatewayEndpoint(api_key="k", allow_hosts=("testserver",))
    client = TestClient(Gateway(front, endpoint=endpoint))
    answer = client.get("/ui")
    assert (answer.status_code, answer.text) == (200, ui.page())
    assert answer.headers["content-type"].startswith("text/html")
    assert client.get("/status").status_code == 401
    assert client.get("/status", headers={"Authorization": "Bearer k"}).json()["models"][0]["name"] == NAME


@pytest.mark.slow
def test_a_browser_shows_the_status_as_text_and_as_plots(tmp_path: Path) -> None:
    with _running() as (address, asked):
        drawn, said = pages.drawn(address, tmp_path)
    assert asked.count("/status") >= 2 and set(asked) <= {"/ui", "/status", "/favicon.ico"}
    assert '<td class="text">org/&lt;b&gt;a&lt;/b&gt; $$x$$</td>' in drawn
    assert "b: it fell &lt;i&gt;over&lt;/i&gt;" in drawn and "snapshot 3.25 s" in drawn
    assert "10.0 GiB" in drawn and 'class="state failed"' in drawn and "version 1.2.3" in drawn
    assert drawn.count("bk-Figure") >= 5
    assert "ncaught" not in said
