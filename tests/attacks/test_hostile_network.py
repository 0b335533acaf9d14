"""More than sixty ways for a registry or a weights server to misbehave, in one process whose memory is measured.

Each ends within its deadline, tells no secret beyond its origin, and leaves nothing in the store.
"""

from __future__ import annotations

import base64
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from coldstart.artifacts import oci, remote
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.errors import BundleError
from coldstart.artifacts.net.http_client import PATIENCE_VARIABLE
from coldstart.artifacts.store import Store
from support.prefetching import checkpoint, prefetcher
from tools.bundles import publish
from tools.memory import run_beside
from tools.raw_server import Asked, answer, answering, challenge, dribble, flood

from coldstart.validate.checks import check
from coldstart.weights.prefetch import PrefetchFailedError, client
from coldstart.weights.prefetch.http_source import HttpSource, headers
from coldstart.weights.prefetch.sources import SourceUnavailableError, SourceUnusableError

SECRET = "hunter2-of-the-origin"
LOGIN = base64.b64encode(f"me:{SECRET}".encode()).decode()
# Far above the patience of half a second, for a busy machine; far below the half a minute that those who hang do.
DEADLINE_S = 20.0
RSS = 200 << 20
BIG = 300 << 20
Behave = Callable[[socket.socket, Asked], None]


def _raw(data: bytes) -> Behave:
    return lambda connection, _: connection.sendall(data)


def _head(status: int, *lines: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status} Said", *lines, "", ""]).encode("latin-1")


def _then(head: bytes, more: Callable[[socket.socket], None]) -> Behave:
    def behave(connection: socket.socket, _: Asked) -> None:
        connection.sendall(head)
        more(connection)

    return behave


def _hangs(connection: socket.socket) -> None:
    time.sleep(30)


def _resets(connection: socket.socket, _: Asked) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()


def _forever(block: bytes) -> Callable[[socket.socket], None]:
    return lambda connection: flood(connection, block, BIG)


def _slowly(data: bytes) -> Callable[[socket.socket], None]:
    return lambda connection: dribble(connection, data, 0.2)


def _gives(token: Callable[[socket.socket], None]) -> Behave:
    """Ask for a token, which the same server gives."""

    def behave(connection: socket.socket, asked: Asked) -> None:
        if asked.path.startswith("/token"):
            return token(connection)
        return challenge(connection, asked, "/token")

    return behave


_OK, _CHUNKED = "Content-Type: application/json", "Transfer-Encoding: chunked"
_RANGE = "Content-Range: bytes 0-4095/4096"
# What any server of HTTP may do, to a registry's client as to a fetch of weights.
COMMON: dict[str, Behave] = {
    "closes at once": lambda c, _: c.close(),
    "resets": _resets,
    "says nothing": lambda c, _: _hangs(c),
    "is no http": _raw(b"220 ftp.example ESMTP\r\n"),
    "is binary": _raw(bytes(range(256)) * 64),
    "is http/0.9": _raw(b"<html>hello</html>"),
    "has an odd version": _raw(b"HTTP/9.9 200 OK\r\n\r\n"),
    "has a status of words": _raw(b"HTTP/1.1 abc OK\r\n\r\n"),
    "has status 99999": _raw(b"HTTP/1.1 99999 OK\r\n\r\n"),
    "continues for ever": _then(b"", _forever(b"HTTP/1.1 100 Continue\r\n\r\n")),
    "continues slowly": _then(b"", _slowly(b"HTTP/1.1 100 Continue\r\n\r\n")),
    "has a status line without end": _then(b"HTTP/1.1 200 ", _forever(b"O" * 65536)),
    "has a header without end": _then(b"HTTP/1.1 200 OK\r\nX: ", _forever(b"y" * 65536)),
    "has headers without end": _then(b"HTTP/1.1 200 OK\r\n", _forever(b"X: y\r\n" * 4096)),
    "dribbles its status": _then(b"", _slowly(b"HTTP/1.1 200 OK\r\n")),
    "dribbles its headers": _then(b"HTTP/1.1 200 OK\r\n", _slowly(b"X: y\r\n")),
    "dribbles its body": _then(_head(200, "Content-Length: 4096"), _slowly(b"x")),
    "dribbles a 206": _then(_head(206, "Content-Length: 4096", _RANGE), _slowly(b"x")),
    "dribbles a chunk's size": _then(_head(200, _CHUNKED), _slowly(b"0")),
    "stops in its body": _then(_head(206, "Content-Length: 4096", _RANGE) + b"x" * 100, _hangs),
    "ends too early": _raw(_head(206, "Content-Length: 4096", _RANGE) + b"x" * 100),
    "has a negative length": _raw(_head(200, "Content-Length: -5") + b"xx"),
    "has a length of words": _raw(_head(200, "Content-Length: many") + b"xx"),
    "has two lengths": _raw(_head(200, "Content-Length: 2", "Content-Length: 9") + b"xx"),
    "has an enormous length": _then(
        _head(200, "Content-Length: 99999999999999999999"), _forever(b"x" * 65536)
    ),
    "has an enormous chunk": _then(_head(200, _CHUNKED) + b"fffffffffffffff\r\n", _forever(b"x" * 65536)),
    "has a bad chunk": _raw(_head(200, _CHUNKED) + b"zz\r\nxx\r\n"),
    "has a negative chunk": _raw(_head(200, _CHUNKED) + b"-5\r\nxx\r\n"),
    "has chunks of nothing": _then(_head(200, _CHUNKED), _forever(b"1;" + b"e" * 4000 + b"\r\nx\r\n")),
    "has trailers without end": _then(_head(200, _CHUNKED) + b"0\r\n", _forever(b"X: y\r\n" * 4096)),
    "gzips a bomb": _raw(
        _head(200, "Content-Encoding: gzip", "Content-Length: 20") + b"\x1f\x8b" + bytes(18)
    ),
    "has a body without length": _then(_head(200), _forever(b"x" * 65536)),
    "errs at length": _then(_head(500, f"Content-Length: {BIG}"), _forever(b"x" * 65536)),
    "denies at length": _then(_head(403, f"Content-Length: {BIG}"), _forever(b"x" * 65536)),
    "is not found at length": _then(_head(404, f"Content-Length: {BIG}"), _forever(b"x" * 65536)),
    "redirects to itself": lambda c, asked: answer(c, 302, {"Location": asked.path}),
    "redirects nowhere": _raw(_head(302, "Content-Length: 0")),
    "redirects to a file": _raw(_head(302, "Location: file:///etc/passwd", "Content-Length: 0")),
    "redirects to ftp": _raw(_head(302, "Location: ftp://127.0.0.1/x", "Content-Length: 0")),
    "redirects to no host": _raw(_head(302, "Location: http:///x", "Content-Length: 0")),
    "redirects to a bad port": _raw(_head(302, "Location: http://127.0.0.1:99999/x", "Content-Length: 0")),
    "redirects with line ends": _raw(_head(302, "Location: /x%0d%0aAuthorization: y", "Content-Length: 0")),
    "redirects with a login": _raw(_head(302, "Location: http://a:b@127.0.0.1:1/x", "Content-Length: 0")),
    "redirects at length": _then(
        _head(302, "Location: /x", f"Content-Length: {BIG}"), _forever(b"x" * 65536)
    ),
    "wants a login of no kind": _raw(_head(401, "Content-Length: 0")),
    "wants a login at length": _raw(
        _head(401, f"WWW-Authenticate: Bearer {'a=b,' * 9000}", "Content-Length: 0")
    ),
    "wants a proxy's login": _raw(_head(407, "Proxy-Authenticate: Basic", "Content-Length: 0")),
    "switches protocols": _raw(_head(101, "Upgrade: h2c", "Connection: Upgrade")),
    "has no content": _raw(_head(204)),
    "asks to wait": _raw(_head(503, "Retry-After: 999999999", "Content-Length: 0")),
    "sets cookies": _raw(_head(200, *["Set-Cookie: a=b"] * 90, "Content-Length: 2") + b"{}"),
}
REGISTRY: dict[str, Behave] = COMMON | {
    "answers an array": lambda c, _: answer(c, 200, {}, b"[]"),
    "answers deep json": lambda c, _: answer(c, 200, {}, b"[" * 500_000),
    "answers twice a member": lambda c, _: answer(c, 200, {}, b'{"schemaVersion":2,"schemaVersion":2}'),
    "answers huge numbers": lambda c, _: answer(c, 200, {}, b'{"schemaVersion":' + b"9" * 5000 + b"}"),
    "answers no utf-8": lambda c, _: answer(c, 200, {}, b'{"a":"\xff"}'),
    "answers another digest": lambda c, _: answer(c, 200, {}, b'{"schemaVersion":2}'),
    "names a realm elsewhere": _raw(
        _head(401, 'WWW-Authenticate: Bearer realm="http://127.0.0.9:1/token"', "Content-Length: 0")
    ),
    "names an invalid realm": _raw(
        _head(401, 'WWW-Authenticate: Bearer realm="gopher://x"', "Content-Length: 0")
    ),
    "names a realm below itself": _raw(
        _head(401, 'WWW-Authenticate: Bearer realm="http://127.0.0.1.example/t"', "Content-Length: 0")
    ),
    "gives a token with line ends": _gives(lambda c: answer(c, 200, {}, b'{"token":"a\\r\\nX: y"}')),
    "gives a token at length": _gives(lambda c: flood(c, _head(200) + b'{"token":"' + b"x" * (1 << 20), BIG)),
    "gives a token for ever": _gives(lambda c: answer(c, 200, {}, b'{"token":"abc"}')),
}
WEIGHTS: dict[str, Behave] = COMMON | {
    "ignores ranges": lambda c, _: answer(c, 200, {}, b"x" * 4096),
    "answers another range": lambda c, _: answer(c, 206, {"Content-Range": "bytes 1-4096/4097"}, b"x" * 4096),
    "answers another size": lambda c, _: answer(c, 206, {"Content-Range": "bytes 0-4095/9"}, b"x" * 4096),
    "answers many ranges": lambda c, _: answer(c, 206, {"Content-Type": "multipart/byteranges"}, b"x" * 4096),
    "answers no range": lambda c, _: answer(c, 206, {}, b"x" * 4096),
    "answers another unit": lambda c, _: answer(c, 206, {"Content-Range": "lines 0-4095/4096"}, b"x" * 4096),
    "is satisfied with nothing": lambda c, _: answer(c, 416, {"Content-Range": "bytes */0"}),
    "sends more than it says": _then(_head(206, "Content-Length: 4096", _RANGE), _forever(b"x" * 65536)),
}


@contextmanager
def _watch() -> Iterator[list[int]]:
    """Yield a list of the resident sizes of this process in the block, less what it had before."""
    before, sizes = _resident(), [0]

    def run(end: threading.Event) -> None:
        while not end.wait(0.005):
            sizes.append(_resident() - before)

    with run_beside(run):
        yield sizes


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("name", REGISTRY)
def test_a_hostile_registry(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATIENCE_VARIABLE, "0.5")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with (
        answering(lambda c, asked: answer(c, 404), "127.0.0.9") as other,
        answering(REGISTRY[name]) as server,
    ):
        (tmp_path / "config.json").write_text(json.dumps({"auths": {server.address: {"auth": LOGIN}}}))
        store, began = Store(tmp_path / "store"), time.monotonic()
        with _watch() as watch, pytest.raises(BundleError) as caught:
            remote.pull(store, f"oci://{server.address}/a/b:v1")
        assert name != "has a bad chunk" or f"{server.address}/v2/a/b" in caught.value.message
        assert time.monotonic() - began < DEADLINE_S
        assert max(watch) < RSS
        assert not store.list_bundles() and not list(store.root.rglob("*.partial"))
        assert SECRET.encode() not in other.heard and LOGIN.encode() not in other.heard


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_hostile_weights_server(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATIENCE_VARIABLE, "0.5")
    into = memoryview(bytearray(4096))
    with answering(WEIGHTS[name]) as server:
        given = headers(server.url.replace("//", f"//me:{SECRET}@"), {})
        source, began = HttpSource(server.url, given), time.monotonic()
        with _watch() as watch, suppress(SourceUnavailableError, SourceUnusableError):
            got = source.read("f", 4096, 0, into, lambda _: None)
            assert 0 < got <= 4096  # whose digest decides
        source.close()
        assert time.monotonic() - began < DEADLINE_S
        assert max(watch) < RSS


def _serve_bundle(made: Bundle, signatures: int, hostile: Mapping[str, Behave]) -> Behave:
    """Return a registry with a bundle and signatures that it lacks. Parts in `hostile` are answered by that behaviour."""
    listed = [
        {"mediaType": oci.MANIFEST_TYPE, "digest": f"sha256:{number:064x}", "size": 700}
        | {"artifactType": oci.SIGNATURE_TYPE}
        for number in range(signatures)
    ]
    index = json.dumps({"schemaVersion": 2, "mediaType": oci.INDEX_TYPE, "manifests": listed}).encode()

    def registry(connection: socket.socket, asked: Asked) -> None:
        last = asked.path.rpartition("/")[2]
        blob = made.layout.root / "blobs" / "sha256" / last.partition(":")[2]
        if "/referrers/" in asked.path:
            part, data = "referrers", index
        elif "/manifests/" in asked.path and not last.startswith("sha256"):
            part, data = "manifest", made.read_image_manifest()
        elif not blob.is_file():
            return hostile.get("signature", lambda c, _: answer(c, 404))(connection, asked)
        else:
            data = blob.read_bytes()
            part = "blob" if len(data) > 1500 else "small blob"
        if part in hostile:
            return hostile[part](connection, asked)
        kind = {"Content-Type": oci.INDEX_TYPE} if part == "referrers" else {}
        return answer(connection, 200, kind, data)

    return registry


@pytest.mark.parametrize("where", ["blob", "referrers", "signature"])
@pytest.mark.parametrize(
    "name", ["dribbles its body", "errs at length", "closes at once", "has a body without length"]
)
def test_hostile_responses_after_a_valid_manifest(
    name: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest is valid, later responses are not. A signature that cannot be fetched neither helps nor stops the pull."""
    monkeypatch.setenv(PATIENCE_VARIABLE, "0.5")
    registry = _serve_bundle(publish(Store(tmp_path / "made"), tmp_path), 1, {where: COMMON[name]})
    store = Store(tmp_path / "store")
    with answering(registry) as server, _watch() as watch:
        began = time.monotonic()
        with suppress(BundleError):
            remote.pull(store, f"oci://{server.address}/a/b:v1")
        assert time.monotonic() - began < DEADLINE_S
    assert max(watch) < RSS
    assert all(check(bundle) == [] for bundle in store.list_bundles())


def test_pull_limits_the_number_of_signatures(tmp_path: Path) -> None:
    made = publish(Store(tmp_path / "made"), tmp_path)
    with answering(_serve_bundle(made, 2000, {})) as server:
        pulled = remote.pull(Store(tmp_path / "store"), f"oci://{server.address}/a/b")
        assert pulled == made
        asked = [one for one in server.asked if one.path.rpartition(":")[2].startswith("000000")]
        assert len(asked) <= 64


def _send_head(connection: socket.socket, asked: Asked, begin: str = "") -> None:
    """Send the head of a complete response to a range request, and the beginning of its body."""
    first, last = asked.headers["range"].removeprefix("bytes=").split("-")
    size = int(last) + 1 - int(first)
    head = f"HTTP/1.1 206 Partial\r\nContent-Length: {size}\r\nContent-Range: bytes {first}-{last}/*\r\n\r\n"
    connection.sendall((head + begin).encode())


def _send_a_byte_per_second(connection: socket.socket, asked: Asked) -> None:
    _send_head(connection, asked)
    dribble(connection, b"x", 1.0)


def _send_a_byte_per_connection(connection: socket.socket, asked: Asked) -> None:
    _send_head(connection, asked, "x")
    connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behave", "message"), [(_send_a_byte_per_second, "bytes"), (_send_a_byte_per_connection, "too slowly")]
)
def test_fetch_fails_when_source_is_too_slow(tmp_path: Path, behave: Behave, message: str) -> None:
    plan = checkpoint(tmp_path / "w")
    settings = {"COLDSTART_PREFETCH_PATIENCE_S": 1, "COLDSTART_HTTP_PATIENCE_S": 1}
    with (
        answering(behave) as slow,
        prefetcher(tmp_path / "r", COLDSTART_PREFETCH_MEMORY_BYTES=256 << 20, **settings) as runtime,
        client.attach(slow.url, plan, directory=runtime) as attached,
    ):
        began = time.monotonic()
        with pytest.raises(PrefetchFailedError, match=message):
            attached.wait_for_tensors()
        assert time.monotonic() - began < 30
