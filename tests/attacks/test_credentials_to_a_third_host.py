"""Credentials go to the host that they are for, and never over plain HTTP."""

from __future__ import annotations

import base64
import json
import socket
from pathlib import Path

import pytest
from coldstart.artifacts import remote
from coldstart.artifacts.errors import BundleError, RemoteDeniedError
from coldstart.artifacts.store import Store
from support.prefetching import checkpoint, prefetcher
from support.range_server import run_server
from tools.raw_server import Asked, RawServer, answer, answering, say

from coldstart.contract.environment import PREFETCH_TOKEN
from coldstart.weights.prefetch import client, fetcher, http_source
from coldstart.weights.prefetch.sources import SourceUnusableError, redact

PASSWORD = "hunter2-of-A"
LOGIN = base64.b64encode(f"user:{PASSWORD}".encode()).decode()


def _log_in(directory: Path, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(directory))
    (directory / "config.json").write_text(json.dumps({"auths": {host: {"auth": LOGIN}}}))


def _received_no_credential(server: RawServer) -> bool:
    return PASSWORD.encode() not in server.heard and LOGIN.encode() not in server.heard


def _gives_tokens(connection: socket.socket, asked: Asked) -> None:
    say(connection, {"token": "stolen"})


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_challenge_behind_a_redirect_is_not_answered(
    status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with answering(_gives_tokens, "127.0.0.3") as third:
        challenge = {"WWW-Authenticate": f'Bearer realm="{third.url}/token",service="x"'}
        with answering(lambda c, _: answer(c, 401, challenge), "127.0.0.2") as second:

            def redirect(connection: socket.socket, asked: Asked) -> None:
                answer(connection, status, {"Location": second.url + asked.path})

            with answering(redirect) as first:
                _log_in(tmp_path, first.address, monkeypatch)
                with pytest.raises(RemoteDeniedError) as denied:
                    remote.pull(Store(tmp_path / "store"), f"oci://{first.address}/a/b")
                assert second.asked and _received_no_credential(second) and not third.asked
                assert "127.0.0.2, to which 127.0.0.1" in denied.value.message


@pytest.mark.parametrize(
    "challenge",
    [
        "",
        "Basic",
        'Bearer realm="{}/token"',
        "Digest realm=x, nonce=y",
        'Bearer realm="http://localhost.example.invalid/token"',
        'Bearer realm="http://127.0.0.1@example.invalid/token"',
    ],
)
def test_registry_may_not_name_a_realm_on_another_host(
    challenge: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with answering(_gives_tokens, "127.0.0.3") as third:
        asks = {"WWW-Authenticate": challenge.format(third.url)}
        with answering(lambda c, _: answer(c, 401, asks)) as first:
            _log_in(tmp_path, first.address, monkeypatch)
            with pytest.raises(RemoteDeniedError, match=r"docker login|COLDSTART_TOKEN_REALMS"):
                remote.pull(Store(tmp_path / "store"), f"oci://{first.address}/a/b")
            assert not third.asked


def test_redirect_of_a_token_server_carries_no_credential(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with answering(_gives_tokens, "127.0.0.3") as third:

        def registry(connection: socket.socket, asked: Asked) -> None:
            if asked.path.startswith("/token"):
                answer(connection, 307, {"Location": third.url + asked.path})
            else:
                realm = f'Bearer realm="http://{asked.headers["host"]}/token"'
                answer(connection, 401, {"WWW-Authenticate": realm})

        with answering(registry) as first:
            _log_in(tmp_path, first.address, monkeypatch)
            with pytest.raises(RemoteDeniedError):
                remote.pull(Store(tmp_path / "store"), f"oci://{first.address}/a/b")
            assert _received_no_credential(third)


def test_blob_redirect_carries_no_credential(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The legitimate case: blobs behind a redirect need no login."""
    with answering(lambda c, _: answer(c, 404), "127.0.0.2") as storage:

        def registry(connection: socket.socket, asked: Asked) -> None:
            if asked.headers.get("authorization") == f"Basic {LOGIN}":
                answer(connection, 307, {"Location": f"{storage.url}{asked.path}?presigned=yes"})
            else:
                answer(connection, 401, {"WWW-Authenticate": "Basic realm=x"})

        with answering(registry) as first:
            _log_in(tmp_path, first.address, monkeypatch)
            with pytest.raises(BundleError):
                remote.pull(Store(tmp_path / "store"), f"oci://{first.address}/a/b")
            assert LOGIN.encode() in first.heard
            assert (
                storage.asked
                and _received_no_credential(storage)
                and b"authorization" not in storage.heard.lower()
            )


TOKEN = {PREFETCH_TOKEN: "s3cret"}


@pytest.mark.parametrize(
    "address", ["http://weights.example/m", "http://10.0.0.1:8000/m", "http://127.0.0.1.example/m"]
)
def test_headers_have_no_token_without_tls(address: str) -> None:
    assert http_source.headers(address, TOKEN) == {}


def test_headers_refuse_password_without_tls() -> None:
    with pytest.raises(SourceUnusableError, match="without TLS"):
        http_source.headers("http://me:s3cret@weights.example/m", {})


def test_source_refuses_explicit_authorization_header_without_tls() -> None:
    source = http_source.HttpSource("http://weights.example/m", {"Authorization": "Bearer s3cret"})
    with pytest.raises(SourceUnusableError, match="without TLS"):
        source.read("f", 4, 0, memoryview(bytearray(4)), lambda _: None)


def test_source_refuses_session_token_without_tls() -> None:
    pytest.importorskip("obstore", exc_type=ImportError)
    given = {"AWS_ENDPOINT_URL": "http://10.0.0.1:9000", "AWS_SESSION_TOKEN": "s3cret", "AWS_REGION": "x"}
    with pytest.raises(SourceUnusableError, match="without TLS"):
        fetcher.open_source("s3://b/m", given)
    fetcher.open_source("s3://b/m", {**given, "AWS_ENDPOINT_URL": "http://127.0.0.1:9000"}).close()


def test_status_shows_presigned_address_without_its_signature(tmp_path: Path) -> None:
    plan = checkpoint(tmp_path / "w")
    query = "?X-Amz-Signature=s3cret&X-Amz-Credential=AKIA"
    assert redact(f"https://me:s3cret@b.example/m{query}#s3cret") == "https://b.example/m"
    with (
        answering(lambda c, _: answer(c, 403)) as server,
        run_server(tmp_path / "w") as good,
        prefetcher(tmp_path / "r", COLDSTART_PREFETCH_MEMORY_BYTES=64 << 20) as runtime,
    ):
        for url in (server.url, good.url):
            with client.attach(url + query, plan, directory=runtime) as attached:
                if url == server.url:
                    with pytest.raises(client.PrefetchFailedError) as failed:
                        attached.complete()
                    assert "s3cret" not in str(failed.value) and "403" in str(failed.value)
                else:
                    attached.complete()
                status = json.dumps(client.request("status", directory=runtime))
                assert "s3cret" not in status and "AKIA" not in status and url in status
