"""Routes of the gateway: models, health, metrics, status, keys and unload."""

import ssl
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient
from support.certificates import write_certificate
from support.fake_upstream import TWO, Stage, staged, wait_until
from support.hosted import NAME, build_status

from coldstart.contract.fallback import Fallback
from coldstart.errors import UsageError
from coldstart.host import status
from coldstart.host.core import Core
from coldstart.host.endpoint import GatewayEndpoint
from coldstart.host.events import RequestArrived
from coldstart.host.live import app
from coldstart.host.live.access_control import FORWARDED_PATHS
from coldstart.host.live.app import Gateway
from coldstart.host.live.exchange import RequestRouter
from coldstart.host.live.http_server import listen
from coldstart.host.live.log import Log
from coldstart.host.live.metrics import EventRecorder
from coldstart.host.live.servers import ReadyServer
from coldstart.host.specification import HostSettings, ModelSpec
from coldstart.host.status import HostFacts


async def test_every_name_is_a_model_whether_it_serves_or_not(tmp_path: Path) -> None:
    adapter = ["--max-model-len", "1k", "--lora-modules", '{"name": "tuned", "path": "/t"}']
    models = {**TWO, "b": {**TWO["b"], "args": adapter}}
    async with staged(tmp_path, models) as stage:
        status, said = await stage.get("/v1/models")
        assert status == 200 and said["object"] == "list"
        cards = {card["id"]: card for card in said["data"]}
        assert list(cards) == ["a", "alpha", "b", "tuned"]
        assert (cards["alpha"]["root"], cards["tuned"]["parent"], cards["a"]["parent"]) == ("a", "b", None)
        assert (await stage.get("/v1/models/tuned"))[1]["root"] == "b"
        assert cards["b"]["max_model_len"] == 1000 and "max_model_len" not in cards["a"]
        status, said = await stage.get("/v1/models/nobody")
        assert status == 404 and said["error"]["type"] == "NotFoundError"
        assert not stage.servers.begun


async def test_unknown_paths_are_not_forwarded(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        for path in ("/sleep", "/v1/load_lora_adapter", "/nowhere"):
            status, _, body = await stage.ask(path=path, model="a")
            assert status == 404 and body["error"]["code"] == 404
        status, said = await stage.get("/v1/completions")
        assert status == 405 and "requires POST" in said["error"]["message"]
        assert said["error"]["type"] == "invalid_request_error"
        status, said = await stage.get("/")
        assert status == 200 and "<html" in said
        assert not stage.servers.begun
        for path in FORWARDED_PATHS:
            assert (await stage.ask(path=path, model="a", prompt=1))[0] == 200


async def test_a_model_is_unloaded_by_hand_and_comes_back_when_asked(tmp_path: Path) -> None:
    models = {**TWO, "b": {**TWO["b"], "pinned": True}}
    async with staged(tmp_path, models, memory=20) as stage:
        for name in "ab":
            await stage.ask(model=name, prompt=1)
        assert (await stage.get("/logs/a")) == (200, "a said so\n")
        assert await stage.send("/unload") == (200, {"unloading": ["a"]})
        await wait_until(lambda: "a" not in stage.driver.lifecycle.replicas)
        assert (await stage.get("/logs/a"))[0] == 404
        assert (await stage.ask(model="a", prompt=1))[0] == 200
        assert (await stage.send("/unload/nobody"))[0] == 404
        assert await stage.send("/unload/a") == (200, {"unloading": ["a"]})
        assert (await stage.get("/unload"))[0] == 405


async def test_an_unlisted_model_is_served_and_not_named(tmp_path: Path) -> None:
    async with staged(tmp_path, {**TWO, "b": {**TWO["b"], "unlisted": True}}) as stage:
        said = (await stage.get("/v1/models"))[1]
        assert [card["id"] for card in said["data"]] == ["a", "alpha"]
        assert (await stage.ask(model="b", prompt=1))[0] == 200


def test_page_needs_no_key() -> None:
    facts = HostFacts(url="", pid=7, version="1")
    router = cast("RequestRouter", SimpleNamespace(status=build_status, facts=facts, log=Log(quiet=True)))
    endpoint = GatewayEndpoint(api_key="k", allow_hosts=("testserver",))
    client = TestClient(Gateway(router, endpoint=endpoint))
    answer = client.get("/ui")
    assert (answer.status_code, answer.content) == (200, app.read_status_page()[0])
    assert answer.headers["content-type"].startswith("text/html")
    for path, moved in {"/ui/": "../ui", "/ui/?theme=dark&a=%20": "../ui?theme=dark&a=%20"}.items():
        redirect = client.get(path, follow_redirects=False)
        assert (redirect.status_code, redirect.headers["location"]) == (307, moved)
        assert client.get(path).url == client.base_url.join(moved.removeprefix(".."))
    refused = client.get("/status")
    assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"  # RFC 9110, 15.5.2
    assert client.get("/status", headers={"Authorization": "Bearer k"}).json()["models"][0]["name"] == NAME


def test_metrics_contain_counters_and_status() -> None:
    core = Core(
        [ModelSpec.with_two_tiers("a", 10, 5.0), ModelSpec.with_two_tiers("b", 10, 5.0)],
        HostSettings(memory=15, policy="lru"),
    )
    facts = HostFacts()
    facts.refused[429] = 2
    core.handle(RequestArrived("1", "a"), 0.0)
    record = EventRecorder(Log(quiet=True), facts, lambda: status.build_status(core, facts, 1.0, 1e9))
    phases = {"read tensors": 0.5, "graphs: 8": 0.25, "graphs: 16": 0.5, "swap out": 0.1}
    fallbacks = [Fallback("kv", "no room").encode(), Fallback("kv", "again").encode()]
    record.record_start(
        "a", ReadyServer("fresh", 1, {"phases": phases, "fallbacks": fallbacks}), "fresh", 2.0
    )
    facts.get_model("a").gpu_memory_bytes = 7
    record.record_start("b", ReadyServer("fresh", 2, {"phases": {"read tensors": 0.25}}), "fresh", 1.0)
    record.record_failed_start("a", "no weights", 1.0)
    samples = {
        (sample.name.removeprefix("coldstart_host_"), *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(record.metrics.format_text().decode())
        for sample in family.samples
    }
    assert samples[("requests_total",)] == 1 and samples[("hits_total",)] == 0
    assert samples[("refused_total", "429")] == 2
    assert samples[("model_held", "a")] == 1 and samples[("model_held_bytes", "a")] == 10
    assert samples[("model_gpu_memory_bytes", "a")] == 7 and ("model_gpu_memory_bytes", "b") not in samples
    assert samples[("model_state", "a", "starting")] == 1 and samples[("model_state", "a", "ready")] == 0
    assert samples[("start_seconds_sum", "a", "fresh")] == 2.0
    stages = {
        key[2]: value for key, value in samples.items() if key[0] == "coldstart_start_phase_seconds_sum"
    }
    assert stages == {"read tensors": 0.75, "graphs": 0.75, "swap out": 0.1}
    assert samples[("coldstart_start_phase_seconds_count", "fresh", "read tensors")] == 2
    assert samples[("failed_starts_total", "a")] == 1
    assert samples[("coldstart_fallbacks_total", "kv")] == 2
    assert samples[("memory_limit_bytes",)] == 15


async def accepts(stage: Stage, trusted: Path) -> bool:
    """Return whether a client that trusts one certificate alone gets an answer."""
    context = ssl.create_default_context(cafile=trusted)
    try:
        async with (
            aiohttp.ClientSession() as client,
            client.get(stage.url + "/health", ssl=context) as answer,
        ):
            return answer.status == 200
    except aiohttp.ClientConnectorCertificateError:
        return False


async def test_request_over_tls_succeeds(tmp_path: Path) -> None:
    cert, key = write_certificate(tmp_path)
    endpoint = GatewayEndpoint(tls_cert=cert, tls_key=key)
    async with staged(tmp_path, gateway={"endpoint": endpoint}) as stage:
        assert stage.url.startswith("https://") and await accepts(stage, cert)


@pytest.mark.parametrize("broken", ["cert.pem", "key.pem"])
def test_listen_reports_a_certificate_that_cannot_be_used(tmp_path: Path, broken: str) -> None:
    cert, key = write_certificate(tmp_path)
    (tmp_path / broken).write_text("nothing")
    endpoint = GatewayEndpoint(port=0, tls_cert=cert, tls_key=key)
    with pytest.raises(UsageError, match="cannot use the certificate"), listen(endpoint):
        pass


def test_listen_names_the_reason_once_when_the_address_is_of_another_machine() -> None:
    endpoint = GatewayEndpoint("192.0.2.77", 0, insecure=True)
    with pytest.raises(UsageError) as error, listen(endpoint):
        pass
    assert error.value.message == "cannot listen at 192.0.2.77:0: Cannot assign requested address"
