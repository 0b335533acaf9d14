"""The page at /ui: self-contained, available without the key, and rendered by a browser from a real status."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from starlette.testclient import TestClient
from support import pages

from coldstart.host import status
from coldstart.host.core import Core
from coldstart.host.endpoint import GatewayEndpoint
from coldstart.host.events import Arrived, Ended, Failed, Started
from coldstart.host.live import ui
from coldstart.host.live.app import Gateway
from coldstart.host.live.exchange import Front
from coldstart.host.live.log import Log
from coldstart.host.specification import HostSettings, ModelSpec
from coldstart.host.status import HostFacts, LastStart

NAME = "org/<b>a</b> $$x$$"


def build_status() -> dict[str, Any]:
    """Return the status of a serving and a failed model."""
    core = Core(
        [ModelSpec.simple(NAME, 10 << 30, 5.0, prewarm="0 8 * * 1-5"), ModelSpec.simple("b", 1 << 30, 7.0)],
        HostSettings(memory=15 << 30, policy="lru"),
    )
    facts = HostFacts(url="http://127.0.0.1:8000", pid=7, version="1.2.3")
    core.handle(Arrived("1", NAME), 2.0)
    core.handle(Started(NAME, 3.0, 10 << 30), 5.0)
    facts.get_model(NAME).gpu_memory_bytes = 9 << 30
    facts.get_model(NAME).next_prewarm_unix_s = 1e9
    facts.get_model(NAME).last_start = LastStart(
        1e9, "snapshot", 3.25, {"import </script>": 1.0, "load weights": 2.0}
    )
    core.handle(Arrived("2", "b"), 5.5)
    core.handle(Ended("1"), 6.0)
    core.handle(Failed("b", "it fell <i>over</i>"), 7.0)
    return status.document(core, facts, 8.0, 1e9)


def test_page_is_self_contained_and_requests_its_host_only() -> None:
    pages.check(ui.page())
    assert "connect-src 'self'" in ui.page()
    assert "innerHTML" not in ui.page().rpartition("</script>")[0].rpartition("<script>")[2]


def test_page_needs_no_key() -> None:
    facts = HostFacts(url="", pid=7, version="1")
    front = cast("Front", SimpleNamespace(status=build_status, facts=facts, log=Log(quiet=True)))
    endpoint = GatewayEndpoint(api_key="k", allow_hosts=("testserver",))
    client = TestClient(Gateway(front, endpoint=endpoint))
    answer = client.get("/ui")
    assert (answer.status_code, answer.text) == (200, ui.page())
    assert answer.headers["content-type"].startswith("text/html")
    for path, moved in {"/ui/": "../ui", "/ui/?theme=dark&a=%20": "../ui?theme=dark&a=%20"}.items():
        redirect = client.get(path, follow_redirects=False)
        assert (redirect.status_code, redirect.headers["location"]) == (307, moved)
        assert client.get(path).url == client.base_url.join(moved.removeprefix(".."))
    assert client.get("/status").status_code == 401
    assert client.get("/status", headers={"Authorization": "Bearer k"}).json()["models"][0]["name"] == NAME
