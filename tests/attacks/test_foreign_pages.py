"""Web pages of other sites, and names that are rebound to a gateway's address: they read and change nothing."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.fake_upstream import Stage, staged

from coldstart.host.endpoint import GatewayEndpoint
from coldstart.host.live import app

FOREIGN = "http://evil.example"
JSON = {"Content-Type": "application/json"}
# Requests that a browser sends for a page of any site without asking the gateway first.
FORMS = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", None]


@asynccontextmanager
async def attack(directory: Path, **endpoint: Any) -> AsyncIterator[Stage]:
    """Yield a gateway that serves model a."""
    async with staged(directory, gateway={"endpoint": GatewayEndpoint(**endpoint)}) as stage:
        assert (await stage.ask(model="a", prompt="good"))[0] == 200
        yield stage


async def ask(stage: Stage, path: str, method: str = "GET", **headers: str | None) -> tuple[int, str]:
    """Return status and body; None as a value leaves a header away."""
    given = {name.replace("_", "-"): value for name, value in headers.items() if value is not None}
    kwargs: dict[str, Any] = {"skip_auto_headers": ["Content-Type"]}
    body = b'{"model": "a", "prompt": "stolen"}' if method == "POST" else None
    async with stage.client.request(method, stage.url + path, data=body, headers=given, **kwargs) as answer:
        return answer.status, await answer.text()


@pytest.mark.parametrize("kind", FORMS)
async def test_foreign_form_changes_nothing(tmp_path: Path, kind: str | None) -> None:
    async with attack(tmp_path) as stage:
        for path in ("/unload", "/unload/a", "/load/b", "/v1/completions"):
            # With and without an Origin header, which old browsers do not send.
            assert (await ask(stage, path, "POST", Content_Type=kind))[0] == 415
            assert (await ask(stage, path, "POST", Content_Type=kind, Origin=FOREIGN))[0] == 403
            assert (await ask(stage, path, "POST", Content_Type=kind, Origin="null"))[0] == 403
        assert stage.servers.last("a").asked == ["good"] and "a" in stage.driver.lifecycle.replicas


async def test_foreign_page_gets_no_consent_to_send_json(tmp_path: Path) -> None:
    async with attack(tmp_path) as stage:
        url = stage.url + "/unload"
        asked = {"Origin": FOREIGN, "Access-Control-Request-Method": "POST"}
        async with stage.client.options(url, headers=asked) as answer:
            assert answer.status == 403
            assert not [name for name in answer.headers if name.lower().startswith("access-control")]


@pytest.mark.parametrize("path", ["/status", "/logs/a", "/metrics", "/v1/models", "/ui"])
async def test_rebound_name_reads_nothing(tmp_path: Path, path: str) -> None:
    async with attack(tmp_path) as stage:
        for name in (
            "evil.example",
            "evil.example:8000",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "",
        ):
            status, text = await ask(stage, path, Host=name)
            assert status == 421 and "good" not in text
        for name in ("localhost", "LOCALHOST:8000", "127.0.0.1", "[::1]:8000", "localhost."):
            assert (await ask(stage, path, Host=name))[0] == 200


async def test_rebound_name_changes_nothing(tmp_path: Path) -> None:
    async with attack(tmp_path) as stage:
        rebound = {"Host": "evil.example:8000", "Origin": "http://evil.example:8000", **JSON}
        for path in ("/unload", "/v1/completions"):
            async with stage.client.post(stage.url + path, data=b"{}", headers=rebound) as answer:
                assert answer.status == 421
        assert "a" in stage.driver.lifecycle.replicas


async def test_websocket_of_a_foreign_page_is_refused(tmp_path: Path) -> None:
    async with attack(tmp_path) as stage:
        for path in ("/status", "/v1/completions"):
            upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Origin": FOREIGN}
            async with stage.client.get(stage.url + path, headers=upgrade) as answer:
                assert answer.status == 400


async def test_own_page_and_allowed_sites_work(tmp_path: Path) -> None:
    async with attack(
        tmp_path, allow_hosts=("gpu.example",), allow_origins=("https://chat.example",)
    ) as stage:
        host = stage.url.removeprefix("http://")
        assert (await ask(stage, "/status", Origin=stage.url))[0] == 200
        assert (await ask(stage, "/status", Host="gpu.example", Origin="https://gpu.example"))[0] == 200
        assert (await ask(stage, "/status", Origin=f"http://evil.example@{host}"))[0] == 403
        headers = {"Origin": "https://chat.example", **JSON}
        async with stage.client.post(stage.url + "/unload", data=b"{}", headers=headers) as answer:
            assert answer.status == 200
            assert answer.headers["access-control-allow-origin"] == "https://chat.example"
        asked = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
        async with stage.client.options(stage.url + "/unload", headers=asked) as answer:
            assert answer.status == 200
        assert (await ask(stage, "/status", Origin=FOREIGN))[0] == 403


async def test_request_with_the_key_needs_no_known_name(tmp_path: Path) -> None:
    async with staged(tmp_path, gateway={"endpoint": GatewayEndpoint(api_key="k")}) as stage:
        assert (await ask(stage, "/status", Host="service.cluster"))[0] == 401
        assert (await ask(stage, "/status", Host="service.cluster", X_Api_Key="k"))[0] == 200


async def test_page_runs_its_own_scripts_alone_and_in_no_frame(tmp_path: Path) -> None:
    async with attack(tmp_path) as stage:
        async with stage.client.get(stage.url + "/ui") as answer:
            policy, page = answer.headers["content-security-policy"], await answer.text()
            assert answer.headers["x-content-type-options"] == "nosniff"
        (scripts,) = re.findall(r"script-src ([^;]*)", policy)
        found = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in found]
        assert scripts.split() == [f"'sha256-{digest}'" for digest in digests] and len(digests) == 1
        assert "frame-ancestors 'none'" in policy and policy.startswith("default-src 'none'")
        assert f'content="{policy.partition("; frame-ancestors")[0]}"' in page
        assert not re.search(r"\son[a-z]+=", page.replace(found[0], ""))
        assert app.read_page() is app.read_page()
