"""Keys and credentials go to the server that they are for alone, never over plain HTTP, and its answers are bounded."""

import base64
import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from coldstart.artifacts import remote
from coldstart.artifacts.errors import BundleError, RemoteDeniedError
from coldstart.artifacts.store import Store
from coldstart.commands._client import MAX_BYTES, ServerClient
from coldstart.commands._output import Output
from support.prefetching import checkpoint, prefetcher
from support.range_server import run_server
from tools.command_line import Run
from tools.raw_server import Asked, RawServer, answer, answering, challenge, dribble, flood, say

from coldstart.contract.environment import PREFETCH_TOKEN
from coldstart.errors import CommandFailedError, UsageError
from coldstart.weights.prefetch import PrefetchFailedError, client, fetcher, http_source
from coldstart.weights.prefetch.sources import SourceUnusableError, redact_address

KEY = "typed-admin-key-0123456789"
STATUS = [
    (("fleet", "status", "--admin-key-file", "key"), "x-coldstart-admin-key", KEY),
    (("host", "status", "--api-key-file", "key"), "authorization", f"Bearer {KEY}"),
]


@pytest.fixture(autouse=True)
def key_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    file = home / "key"
    file.write_text(f"{KEY}\n")
    file.chmod(0o600)
    return file


def _redirect(to: RawServer, status: int = 302) -> Callable[..., None]:
    return lambda connection, asked: answer(connection, status, {"Location": f"{to.url}{asked.path}"})


def _serve(connection: object, asked: Asked) -> None:
    say(connection, {"host": {}, "models": []})  # type: ignore[arg-type]


@pytest.mark.parametrize(("words", "header", "value"), STATUS)
@pytest.mark.parametrize("status", [302, 307])
def test_key_does_not_follow_a_redirect_to_another_origin(
    run: Run, words: tuple[str, ...], header: str, value: str, status: int
) -> None:
    with answering(_serve) as other, answering(_redirect(other, status)) as server:
        done = run(*words, "--url", server.url, code=1)
        assert server.asked[0].headers[header] == value
        assert other.asked == []
        assert f"redirects to {other.url}" in done.stderr and KEY not in done.stderr


def test_redirected_order_fails_and_is_not_sent_again_as_a_get(run: Run) -> None:
    def turn(connection: object, asked: Asked) -> None:
        if asked.path == "/fleet/down":
            answer(connection, 302, {"Location": "/elsewhere"})  # type: ignore[arg-type]
        else:
            say(connection, {})  # type: ignore[arg-type]

    with answering(turn) as server:
        done = run("fleet", "down", "--url", server.url, "--admin-key-file", "key", code=1)
        assert [(one.method, one.path) for one in server.asked] == [("POST", "/fleet/down")]
        assert f"redirects to {server.url}/elsewhere" in done.stderr and "Ended" not in done.stderr


@pytest.mark.parametrize(("words", "header", "value"), STATUS)
def test_proxy_receives_no_key_for_loopback(
    run: Run, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], header: str, value: str
) -> None:
    with answering(_serve) as proxy, answering(_redirect(proxy)) as server:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        run(*words, "--url", server.url, code=1)
        assert server.asked[0].headers[header] == value
        assert proxy.heard == b""


@pytest.mark.parametrize("words", [words for words, *_ in STATUS])
def test_proxy_receives_no_key_in_clear_text_for_another_machine(
    run: Run, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    with answering(_serve) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        done = run(*words, "--url", "http://host.invalid:8000", code=2)
        assert proxy.heard == b""
        assert "in clear text through a proxy" in done.stderr and "NO_PROXY=host.invalid" in done.stderr


@pytest.mark.parametrize("typed", [True, False])
def test_netrc_neither_replaces_nor_adds_a_key(run: Run, home: Path, typed: bool) -> None:
    (home / ".netrc").write_text("machine 127.0.0.1\nlogin someone\npassword from-netrc\n")
    (home / ".netrc").chmod(0o600)
    with answering(lambda c, _: say(c, {}, 401)) as server:
        run("host", "status", "--url", server.url, *(("--api-key-file", "key") if typed else ()), code=1)
        (asked,) = server.asked
        assert asked.headers.get("authorization") == (f"Bearer {KEY}" if typed else None)
        assert b"c29tZW9uZTpmcm9tLW5ldHJj" not in asked.raw  # someone:from-netrc


@pytest.mark.parametrize("words", [words for words, *_ in STATUS])
def test_endless_body_is_read_to_a_limit(run: Run, words: tuple[str, ...]) -> None:
    sent: list[int] = []

    def pour(connection: object, asked: Asked) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")  # type: ignore[attr-defined]
        for _ in range(64):
            flood(connection, b" " * (1 << 20), 1 << 20)  # type: ignore[arg-type]
            sent.append(1 << 20)

    with answering(pour) as server:
        assert "16.0 MiB" in run(*words, "--url", server.url, code=1).stderr
        assert sum(sent) < 2 * MAX_BYTES


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\n["])
def test_endless_answer_fails_at_the_deadline(head: bytes) -> None:
    with answering(lambda c, _: dribble(c, head, 0.005)) as server:
        client = ServerClient(server.url, {}, Output(), wait_s=0.4, silent_s=0.4)
        with pytest.raises(CommandFailedError, match="no host responds"):
            client.call("/status")


def test_key_of_the_command_line_is_used_with_a_warning(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(lambda c, _: say(c, {}, 401)) as server:
        url = ("host", "status", "--url", server.url)
        typed = run(*url, "--api-key", KEY, code=1).stderr
        assert "use --api-key-file FILE or set COLDSTART_HOST_STATUS_API_KEY" in typed
        assert "both set" in run(*url, "--api-key", KEY, "--api-key-file", "key", code=2).stderr
        assert "warning" not in run(*url, "--api-key-file", "key", code=1).stderr
        monkeypatch.setenv("COLDSTART_HOST_STATUS_API_KEY", KEY)
        assert "warning" not in run(*url, code=1).stderr
        assert [one.headers["authorization"] for one in server.asked] == [f"Bearer {KEY}"] * 3


def test_key_to_another_machine_without_tls_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    ServerClient("http://host.invalid", {"x": KEY}, Output(), wait_s=1)
    assert "key is sent to http://host.invalid without TLS" in capsys.readouterr().err
    with pytest.raises(UsageError, match="not printable ASCII"):
        ServerClient("https://host.invalid", {"x": "a\r\nb: c"}, Output(), wait_s=1)


PASSWORD = "hunter2-of-A"
LOGIN = base64.b64encode(f"user:{PASSWORD}".encode()).decode()


def _pull_with_login(directory: Path, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(directory))
    (directory / "config.json").write_text(json.dumps({"auths": {host: {"auth": LOGIN}}}))
    remote.pull(Store(directory / "store"), f"oci://{host}/a/b")


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
                with pytest.raises(RemoteDeniedError) as denied:
                    _pull_with_login(tmp_path, first.address, monkeypatch)
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
            with pytest.raises(RemoteDeniedError, match=r"docker login|COLDSTART_TOKEN_REALMS"):
                _pull_with_login(tmp_path, first.address, monkeypatch)
            assert not third.asked


def test_redirect_of_token_server_has_no_credential(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(_gives_tokens, "127.0.0.3") as third:

        def registry(connection: socket.socket, asked: Asked) -> None:
            if asked.path.startswith("/token"):
                answer(connection, 307, {"Location": third.url + asked.path})
            else:
                challenge(connection, asked, "/token")

        with answering(registry) as first:
            with pytest.raises(RemoteDeniedError):
                _pull_with_login(tmp_path, first.address, monkeypatch)
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
            with pytest.raises(BundleError):
                _pull_with_login(tmp_path, first.address, monkeypatch)
            assert LOGIN.encode() in first.heard
            assert storage.asked
            assert _received_no_credential(storage)
            assert b"authorization" not in storage.heard.lower()


TOKEN = {PREFETCH_TOKEN: "s3cret"}


@pytest.mark.parametrize(
    "address", ["http://weights.example/m", "http://10.0.0.1:8000/m", "http://127.0.0.1.example/m"]
)
def test_source_has_no_credential_without_tls(address: str) -> None:
    assert http_source.headers(address, TOKEN) == {}
    with pytest.raises(SourceUnusableError, match="without TLS"):
        http_source.headers(address.replace("//", "//me:s3cret@"), {})
    source = http_source.HttpSource(address, {"Authorization": "Bearer s3cret"})
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
    assert redact_address(f"https://me:s3cret@b.example/m{query}#s3cret") == "https://b.example/m"
    with (
        answering(lambda c, _: answer(c, 403)) as server,
        run_server(tmp_path / "w") as good,
        prefetcher(tmp_path / "r", COLDSTART_PREFETCH_MEMORY_BYTES=64 << 20) as runtime,
    ):
        for url in (server.url, good.url):
            with client.attach(url + query, plan, directory=runtime) as attached:
                if url == server.url:
                    with pytest.raises(PrefetchFailedError) as failed:
                        attached.wait_for_tensors()
                    assert "s3cret" not in str(failed.value) and "403" in str(failed.value)
                else:
                    attached.wait_for_tensors()
                status = json.dumps(client.request("status", directory=runtime))
                assert "s3cret" not in status and "AKIA" not in status and url in status
