"""Credentials are sent after a challenge, only to their registry, and missing ones are reported."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from coldstart.artifacts.registry_auth import RegistrySession
from tools.raw_server import Asked, answer, answering

_LOGIN = base64.b64encode(b"user:secret").decode()


class _Guard:
    """Registry that requires `wanted`, challenges with `challenge`, and records every Authorization header."""

    challenge: ClassVar[str] = ""
    wanted: ClassVar[str] = ""
    seen: ClassVar[list[tuple[str, str | None]]] = []

    @classmethod
    def respond(cls, connection: socket.socket, asked: Asked) -> None:
        given = asked.headers.get("authorization")
        cls.seen.append((asked.path, given))
        if asked.path.startswith("/token"):
            answer(connection, 200 if given == f"Basic {_LOGIN}" else 401, {}, b'{"token":"abc"}')
        elif given == cls.wanted:
            answer(connection, 200, {}, b"yes")
        else:
            answer(connection, 401, {"WWW-Authenticate": cls.challenge} if cls.challenge else {})


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """HOST:PORT of a guarded registry to which the user has logged in."""
    _Guard.seen = []
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with answering(_Guard.respond) as server:
        (tmp_path / "config.json").write_text(json.dumps({"auths": {server.address: {"auth": _LOGIN}}}))
        yield server.address


def test_bearer_token_is_asked_for_once_with_the_repository_as_scope(host: str) -> None:
    _Guard.challenge = f'Bearer realm="http://{host}/token",service="here"'
    _Guard.wanted = "Bearer abc"
    session = RegistrySession(host, "a/b")
    assert session.ask("GET", f"http://{host}/v2/").read_up_to(9) == b"yes"
    assert session.ask("GET", f"http://{host}/v2/").read_up_to(9) == b"yes"
    tokens = [path for path, _ in _Guard.seen if path.startswith("/token")]
    assert len(tokens) == 1 and tokens[0].endswith("repository%3Aa%2Fb%3Apull")
