"""Logins as docker stores them: in its configuration, or in a credential helper that docker's client fills here."""

import base64
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from coldstart.artifacts import credentials, remote
from coldstart.artifacts.credentials import Login
from coldstart.artifacts.errors import BundleError, RemoteDeniedError
from coldstart.artifacts.registry_auth import RegistrySession
from coldstart.artifacts.store import Store
from tools.raw_server import Asked, answer, answering, challenge, say

HOST = "registry.example:5000"
# Implements docker's documented protocol: store, get, erase and list, with JSON or the address on stdin.
_HELPER = """#!{python}
import json, sys
from pathlib import Path
kept = Path({kept!r})
known = json.loads(kept.read_text()) if kept.exists() else {{}}
given = sys.stdin.read()
if sys.argv[1] == "store":
    entry = json.loads(given)
    known[entry["ServerURL"]] = entry
elif sys.argv[1] == "erase":
    known.pop(given.strip(), None)
elif sys.argv[1] == "list":
    print(json.dumps({{k: v["Username"] for k, v in known.items()}}))
elif given.strip() in known:
    print(json.dumps(known[given.strip()]))
else:
    print("credentials not found in native keychain")
    sys.exit(1)
kept.write_text(json.dumps(known))
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create docker's directory and a helper called `test` on PATH."""
    (tmp_path / "bin").mkdir()
    _write(tmp_path, "test", _HELPER.format(python=sys.executable, kept=str(tmp_path / "kept.json")))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    return tmp_path


def _write(directory: Path, name: str, text: str) -> None:
    program = directory / "bin" / f"docker-credential-{name}"
    program.write_text(text)
    program.chmod(0o755)


def _configure(docker: Path, **members: object) -> None:
    (docker / "config.json").write_text(json.dumps(members))


def _keep(docker: Path, host: str, user: str, secret: str) -> None:
    entry = json.dumps({"ServerURL": host, "Username": user, "Secret": secret})
    subprocess.run([docker / "bin" / "docker-credential-test", "store"], input=entry, text=True, check=True)


def test_a_helper_that_fails_is_named(docker: Path) -> None:
    _write(docker, "locked", "#!/bin/sh\necho the keychain is locked\nexit 1\n")
    _configure(docker, credsStore="locked")
    with pytest.raises(RemoteDeniedError, match=r"docker-credential-locked failed: the keychain is locked"):
        credentials.find_login(HOST)
    _configure(docker, credsStore="missing")
    with pytest.raises(RemoteDeniedError, match="docker-credential-missing"):
        credentials.find_login(HOST)


@pytest.mark.parametrize("name", ["../../tmp/evil", "a b", "", ".hidden", 7, None])
def test_stored_ignores_a_helper_name_that_is_a_path(name: object, docker: Path) -> None:
    _configure(docker, credsStore=name, credHelpers={HOST: name})
    assert credentials.find_login(HOST) is None


def test_identity_token_is_exchanged_for_an_access_token(docker: Path, tmp_path: Path) -> None:
    """A helper's <token> is not a password: it is posted to the token server and never sent as Basic."""

    def registry(connection: socket.socket, asked: Asked) -> None:
        if asked.method == "POST" and asked.path.startswith("/oauth2"):
            say(connection, {"access_token": "abc"})
        elif asked.headers.get("authorization") == "Bearer abc":
            answer(connection, 404)
        else:
            challenge(connection, asked, "/oauth2/token", ',service="s"')

    with answering(registry) as server:
        _configure(docker, credHelpers={server.address: "test"})
        _keep(docker, server.address, "<token>", "refresh-me")
        with pytest.raises(BundleError, match="does not exist"):
            remote.pull(Store(tmp_path / "store"), f"oci://{server.address}/a/b")
        (posted,) = [one for one in server.asked if one.method == "POST"]
    assert b"grant_type=refresh_token" in posted.raw and b"refresh_token=refresh-me" in posted.raw
    assert b"Basic" not in server.heard


@pytest.mark.skipif(shutil.which("docker") is None, reason="docker's client is not installed")
def test_login_of_docker_opens_the_registry(docker: Path, tmp_path: Path) -> None:
    """docker's client logs in and fills the helper; the stored login opens the registry."""
    wanted = "Basic " + base64.b64encode(b"me:pa55").decode()

    def registry(connection: socket.socket, asked: Asked) -> None:
        if asked.headers.get("authorization") != wanted:
            answer(connection, 401, {"WWW-Authenticate": 'Basic realm="here"'})
        else:
            answer(connection, 200 if asked.path == "/v2/" else 404)

    with answering(registry) as server:
        _configure(docker, credsStore="test")
        login = ["docker", "login", server.address, "--username", "me", "--password-stdin"]
        environment = {**os.environ, "DOCKER_HOST": "unix:///nonexistent"}
        done = subprocess.run(
            login, input="pa55", text=True, capture_output=True, timeout=60, env=environment, check=False
        )
        if done.returncode and "daemon" in done.stderr.lower():
            pytest.skip(f"this docker logs in through its daemon only: {done.stderr.strip()[:120]}")
        assert done.returncode == 0, done.stderr
        assert "pa55" not in (docker / "config.json").read_text()
        assert credentials.find_login(server.address) == Login("me", "pa55")
        with pytest.raises(BundleError, match="does not exist"):
            remote.pull(Store(tmp_path / "store"), f"oci://{server.address}/a/b")


def test_bearer_token_is_asked_for_once_with_the_repository_as_scope(docker: Path) -> None:
    login = base64.b64encode(b"user:secret").decode()

    def registry(connection: socket.socket, asked: Asked) -> None:
        given = asked.headers.get("authorization")
        if asked.path.startswith("/token"):
            answer(connection, 200 if given == f"Basic {login}" else 401, {}, b'{"token":"abc"}')
        elif given == "Bearer abc":
            answer(connection, 200, {}, b"yes")
        else:
            challenge(connection, asked, "/token", ',service="here"')

    with answering(registry) as server:
        _configure(docker, auths={server.address: {"auth": login}})
        session = RegistrySession(server.address, "a/b")
        for _ in range(2):
            assert session.request("GET", f"{server.url}/v2/").read_up_to(9) == b"yes"
        (token,) = [one.path for one in server.asked if one.path.startswith("/token")]
    assert token.endswith("repository%3Aa%2Fb%3Apull")
