"""Keys open the models of their clients only; gateways are not open by accident, and pages of other sites change nothing."""

import asyncio
import base64
import hashlib
import io
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.client_key_files import write_clients
from support.fake_upstream import TWO, Stage, staged, wait_until
from tools.command_line import Run

from coldstart.errors import UsageError
from coldstart.host.endpoint import ClientKeys, GatewayEndpoint
from coldstart.host.live import app
from coldstart.host.live.log import Log

CLIENTS = {"laptop": 'models = ["alpha"]', "ci": "", "operator": "admin = true", "nothing": "models = []"}
ADMIN = (
    ("GET", "/status"),
    ("GET", "/metrics"),
    ("GET", "/logs/a"),
    ("GET", "/upstream/a/version"),
    ("POST", "/load/a"),
    ("POST", "/unload"),
    ("POST", "/unload/a"),
)


def _gateway(directory: Path, **more: Any) -> dict[str, Any]:
    keys = ClientKeys(write_clients(directory, CLIENTS))
    return {"endpoint": GatewayEndpoint(client_keys=keys, **more)}


async def _send(stage: Stage, method: str, path: str, key: str, **body: Any) -> tuple[int, Any]:
    return await stage.send(path, method, body, **({"Authorization": f"Bearer {key}"} if key else {}))


async def _ask(stage: Stage, key: str, model: str | None, path: str = "/v1/completions") -> tuple[int, Any]:
    return await _send(stage, "POST", path, key, prompt=1, **({} if model is None else {"model": model}))


@pytest.mark.parametrize("key", ["", "key-of-", "key-of-laptop2", "Key-of-laptop", "laptop"])
async def test_wrong_key_is_refused_everywhere_but_at_the_open_paths(tmp_path: Path, key: str) -> None:
    async with staged(tmp_path, gateway=_gateway(tmp_path)) as stage:
        assert (await _ask(stage, key, "a"))[0] == 401
        for method, path in (*ADMIN, ("GET", "/v1/models")):
            assert (await _send(stage, method, path, key))[0] == 401
        assert (await _send(stage, "GET", f"/v1/models?key={key or 'key-of-ci'}", ""))[0] == 401
        assert (await _send(stage, "GET", "/health", key))[0] == 200
        assert not stage.servers.begun


async def test_client_reaches_its_models_only_by_any_name_and_path(tmp_path: Path) -> None:
    async with staged(tmp_path, {**TWO}, gateway=_gateway(tmp_path)) as stage:
        for model, path in (("b", "/v1/completions"), (None, "/tokenize")):
            status, content = await _ask(stage, "key-of-laptop", model, path)
            assert status == 403 and content["error"]["type"] == "PermissionDeniedError"
            assert "key-of" not in str(content)
        assert (await _ask(stage, "key-of-nothing", "a"))[0] == 403
        assert not stage.servers.begun


async def test_models_of_a_client_are_the_only_ones_that_it_sees(tmp_path: Path) -> None:
    async with staged(tmp_path, gateway=_gateway(tmp_path)) as stage:
        seen = {}
        for name in CLIENTS:
            found = (await _send(stage, "GET", "/v1/models", f"key-of-{name}"))[1]
            seen[name] = [card["id"] for card in found["data"]]
        assert seen == {
            "laptop": ["a", "alpha"],
            "ci": ["a", "alpha", "b"],
            "operator": ["a", "alpha", "b"],
            "nothing": [],
        }
        assert (await _send(stage, "GET", "/v1/models/b", "key-of-laptop"))[0] == 404


async def test_client_that_is_no_admin_controls_nothing(tmp_path: Path) -> None:
    async with staged(tmp_path, gateway=_gateway(tmp_path, api_key="operators-key")) as stage:
        assert (await _ask(stage, "key-of-ci", "a"))[0] == 200
        for method, path in ADMIN:
            status, content = await _send(stage, method, path, "key-of-ci")
            assert status == 403 and "client ci has no admin access" in content["error"]["message"]
        for key in ("key-of-operator", "operators-key"):
            for path in ("/status", "/metrics", "/logs/a"):
                assert (await _send(stage, "GET", path, key))[0] == 200


async def test_status_and_metrics_count_requests_and_refusals_without_the_key(tmp_path: Path) -> None:
    async with staged(tmp_path, gateway=_gateway(tmp_path)) as stage:
        for key, model in [("wrong", "a"), ("key-of-laptop", "b"), *[("key-of-laptop", "a")] * 3]:
            await _ask(stage, key, model)
        await _send(stage, "GET", "/status", "key-of-ci")
        document = (await _send(stage, "GET", "/status", "key-of-operator"))[1]
        assert document["requests"]["refused"] == {"401": 1, "403": 2}
        text = (await _send(stage, "GET", "/metrics", "key-of-operator"))[1]
        for code, count in (("401", 1.0), ("403", 2.0)):
            assert f'refused_total{{code="{code}"}} {count}' in text
        for outcome, count in (("admitted", 3.0), ("other_model", 1.0)):
            assert f'client_requests_total{{client="laptop",outcome="{outcome}"}} {count}' in text
        assert "key-of" not in text


async def test_running_gateway_notices_a_changed_key_and_survives_a_broken_file(tmp_path: Path) -> None:
    async def answers(stage: Stage, key: str) -> int:
        return (await _send(stage, "GET", "/v1/models", key))[0]

    async with asyncio.timeout(60), staged(tmp_path, gateway=_gateway(tmp_path)) as stage:
        sink = io.StringIO()
        stage.driver.log = Log(sink)
        (tmp_path / "ci.key").write_text("rotated\n")
        while await answers(stage, "rotated") != 200:
            await asyncio.sleep(0.01)
        assert await answers(stage, "key-of-ci") == 401
        (tmp_path / "keys.toml").write_text("[ci\n")
        await wait_until(lambda: "client keys refused" in sink.getvalue())
        assert await answers(stage, "rotated") == 200 and "rotated" not in sink.getvalue()
        assert "as TOML: " in stage.driver.status()["host"]["client_keys_error"]
        assert b"coldstart_host_client_keys_refused 1.0" in stage.driver.metrics.format_text()
        write_clients(tmp_path, {"ci": 'models = ["a", "absent"]'})
        await wait_until(lambda: "client ci is allowed to use model absent" in sink.getvalue())
        assert sink.getvalue().count("which does not exist") == 1
        assert not stage.driver.status()["host"]["client_keys_error"]
        assert b"coldstart_host_client_keys_refused 0.0" in stage.driver.metrics.format_text()
        (tmp_path / "ci.key").chmod(0o644)
        await wait_until(lambda: "chmod 600" in sink.getvalue())


SECRETS = {
    "Authorization": "Bearer clients-key",
    "X-Api-Key": "clients-key",
    "Cookie": "session=clients-key",
    "Proxy-Authorization": "Basic clients-key",
    "X-Coldstart-Admin-Key": "clients-key",
    "Connection": "keep-alive, X-Hop",  # X-Hop is for this connection alone (RFC 9110, 7.6.1)
    "X-Hop": "clients-key",
}


@pytest.mark.parametrize("args", [[], ["--api-key", "servers-key"]])
async def test_server_receives_its_own_key_alone(tmp_path: Path, args: list[str]) -> None:
    models = {**TWO, "a": {**TWO["a"], "args": args}}
    gateway = {"endpoint": GatewayEndpoint(api_key="clients-key")}
    async with staged(tmp_path, models, gateway=gateway) as stage:
        body = {"model": "a", "prompt": "x"}
        url = stage.url + "/v1/completions"
        async with stage.client.post(url, json=body, headers=SECRETS) as answer:
            assert answer.status == 200
        (received,) = stage.servers.last("a").headers
        assert "clients-key" not in str(received) and "cookie" not in received
        assert received.get("authorization") == (f"Bearer {args[1]}" if args else None)


HOST = ("host", "run", "tiny-llama", "--memory", "1GiB")
FLEET = ("fleet", "up")


@pytest.mark.parametrize("words", [HOST, FLEET], ids=["host", "fleet"])
@pytest.mark.parametrize("key", ["", " "])
def test_empty_key_is_refused(
    run: Run, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], key: str
) -> None:
    assert "--api-key is empty" in run(*words, "--api-key", key, code=2).stderr
    monkeypatch.setenv(f"COLDSTART_{'_'.join(words[:2]).upper()}_API_KEY", key)
    assert "--api-key is empty" in run(*words, code=2).stderr


def test_empty_admin_key_is_refused(run: Run) -> None:
    assert "--admin-key is empty" in run("fleet", "up", "--admin-key", "", code=2).stderr


@pytest.mark.parametrize("words", [HOST, FLEET], ids=["host", "fleet"])
@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.0.2.7"])
def test_other_machines_are_refused_without_a_key(run: Run, words: tuple[str, ...], address: str) -> None:
    done = run(*words, "--host", address, code=2)
    assert f"cannot listen at {address} without an API key" in done.stderr and "--insecure" in done.stderr


@pytest.mark.parametrize(
    "endpoint",
    [
        GatewayEndpoint("0.0.0.0", insecure=True),
        GatewayEndpoint("0.0.0.0", api_key="k"),
        GatewayEndpoint("localhost"),
        GatewayEndpoint("127.3.2.1"),
        GatewayEndpoint("::1"),
    ],
)
def test_chosen_endpoints_pass(endpoint: GatewayEndpoint) -> None:
    endpoint.check()


@pytest.mark.parametrize(
    ("endpoint", "message"),
    [
        (GatewayEndpoint(api_key=""), "key is empty"),
        (GatewayEndpoint(port=65536), "--port must be at least 0, at most 65535, found 65536"),
        (GatewayEndpoint(allow_hosts=("http://x",)), "not a host name"),
        (GatewayEndpoint(allow_origins=("evil.example",)), "not an origin"),
        (GatewayEndpoint(allow_origins=("*",)), "not an origin"),
        (GatewayEndpoint(tls_cert=Path("cert.pem")), "certificate and its key"),
    ],
)
def test_wrong_endpoints_are_refused(endpoint: GatewayEndpoint, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        endpoint.check()


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
    foreign = ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "")
    async with attack(tmp_path) as stage:
        for name in foreign:
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
        asked["Access-Control-Request-Headers"] = "authorization,x-stainless-os"  # as OpenAI's client
        async with stage.client.options(stage.url + "/unload", headers=asked) as answer:
            assert answer.status == 200
        assert (await ask(stage, "/status", Origin=FOREIGN))[0] == 403


async def test_request_with_the_key_needs_no_known_name(tmp_path: Path) -> None:
    async with staged(tmp_path, gateway={"endpoint": GatewayEndpoint(api_key="k")}) as stage:
        assert (await ask(stage, "/status", Host="service.cluster"))[0] == 401
        assert (await ask(stage, "/status", Host="service.cluster", X_Api_Key="k"))[0] == 200
        assert (await ask(stage, "/status", Host="service.cluster", Authorization="bearer k"))[0] == 200


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
        assert app.read_status_page() is app.read_status_page()
