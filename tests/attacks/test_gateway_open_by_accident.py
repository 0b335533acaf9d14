"""A gateway serves other machines only if the user allows it, and an empty key is an error."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.shell import Run

from coldstart.errors import UsageError
from coldstart.host.endpoint import GatewayEndpoint

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


def test_empty_admin_key_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
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
        (GatewayEndpoint(allow_hosts=("http://x",)), "not a host name"),
        (GatewayEndpoint(allow_origins=("evil.example",)), "not an origin"),
        (GatewayEndpoint(allow_origins=("*",)), "not an origin"),
        (GatewayEndpoint(tls_cert=Path("cert.pem")), "certificate and its key"),
    ],
)
def test_wrong_endpoints_are_refused(endpoint: GatewayEndpoint, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        endpoint.check()
