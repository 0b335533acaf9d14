"""Credentials: sent when asked for, only to whom they belong, and missing ones are named."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from coldstart.artifacts.errors import RemoteDeniedError
from coldstart.artifacts.registry_auth import RegistrySession

_LOGIN = base64.b64encode(b"user:secret").decode()


class _Guard(BaseHTTPRequestHandler):
    """A registry that wants `wanted`, challenges with `challenge`, and notes every Authorization it sees."""

    challenge: ClassVar[str] = ""
    wanted: ClassVar[str] = ""
    seen: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        given = self.headers.get("Authorization")
        self.seen.append((self.path, given))
        if self.path.startswith("/token"):
            self._answer(200 if given == f"Basic {_LOGIN}" else 401, b'{"token":"abc"}')
        elif given == self.wanted:
            self._answer(200, b"yes")
        else:
            self._answer(401, b"", self.challenge)

    def _answer(self, status: int, body: bytes, challenge: str = "") -> None:
        self.send_response(status)
        if challenge:
            self.send_header("WWW-Authenticate", challenge)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test output clean."""


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """HOST:PORT of a guarded registry to which the user has logged in."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Guard)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    address = f"127.0.0.1:{server.server_port}"
    _Guard.seen = []
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"auths": {address: {"auth": _LOGIN}}}))
    yield address
    server.shutdown()
    server.server_close()


def test_basic(host: str) -> None:
    _Guard.challenge, _Guard.wanted = "Basic realm=x", f"Basic {_LOGIN}"
    session = RegistrySession(host, "a/b")
    assert session.ask("GET", f"http://{host}/v2/").read_up_to(9) == b"yes"
    assert session.ask("GET", f"http://{host}/v2/").read_up_to(9) == b"yes"
    assert [given is None for _, given in _Guard.seen] == [True, False, False]


def test_bearer_token_is_asked_for_once_with_the_repository_as_scope(host: str) -> None:
    _Guard.challenge = f'Bearer realm="http://{host}/token",service="here"'
    _Guard.wanted = "Bearer abc"
    session = RegistrySession(host, "a/b")
    assert session.ask("GET", f"http://{host}/v2/").read_up_to(9) == b"yes"
    assert session.ask("GET", f"http://{host}/v2/").read_up_to(9) == b"yes"
    tokens = [path for path, _ in _Guard.seen if path.startswith("/token")]
    assert len(tokens) == 1 and tokens[0].endswith("repository%3Aa%2Fb%3Apull")


def test_credentials_go_to_no_other_host(host: str) -> None:
    _Guard.challenge, _Guard.wanted = "Basic realm=x", f"Basic {_LOGIN}"
    session = RegistrySession(host, "a/b")
    session.ask("GET", f"http://{host}/v2/")
    with pytest.raises(RemoteDeniedError):
        session.ask("GET", f"http://localhost:{host.split(':')[1]}/v2/")
    assert _Guard.seen[-1][1] is None


@pytest.mark.parametrize(
    "challenge",
    [
        "",
        "Negotiate",
        'Bearer realm="http://example.invalid/token"',
        'Bearer realm="http://localhost.example.invalid/token"',
        'Bearer realm="http://127.0.0.1@example.invalid/token"',
    ],
)
def test_a_challenge_that_cannot_be_met_names_the_mend(host: str, challenge: str) -> None:
    _Guard.challenge, _Guard.wanted = challenge, "never"
    with pytest.raises(RemoteDeniedError, match=r"docker login|COLDSTART_TOKEN_REALMS"):
        RegistrySession(host, "a/b").ask("GET", f"http://{host}/v2/")


def test_without_a_login(host: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").unlink()
    _Guard.challenge, _Guard.wanted = "Basic realm=x", f"Basic {_LOGIN}"
    with pytest.raises(RemoteDeniedError, match="none are stored"):
        RegistrySession(host, "a/b").ask("GET", f"http://{host}/v2/")
