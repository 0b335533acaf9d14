"""The kinds of sources: redirects and credentials over HTTP, an S3-compatible store, the hub; and the drawn span."""

from __future__ import annotations

import base64
import shutil
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from prefetching import Weights, check_whole
from support.range_server import serving

from coldstart.weights.prefetch import client, http_source, sources
from coldstart.weights.prefetch.sources import SourceUnavailableError, SourceUnusableError, redact


class _Scripted(BaseHTTPRequestHandler):
    """Answers each path with its (status, headers, body), and keeps what it was asked."""

    protocol_version = "HTTP/1.1"
    script: dict[str, tuple[int, dict[str, str], bytes]]
    asked: list[tuple[str, str | None]]

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers["Authorization"]))
        status, extra, body = self.script.get(self.path, (404, {}, b""))
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **extra}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


@contextmanager
def _scripted(
    script: dict[str, tuple[int, dict[str, str], bytes]], context: ssl.SSLContext | None = None
) -> Iterator[tuple[str, type[_Scripted]]]:
    handler = type("Handler", (_Scripted,), {"script": script, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"{'https' if context else 'http'}://127.0.0.1:{server.server_port}", handler
    finally:
        server.shutdown()
        server.server_close()


def _read(source: http_source.HttpSource, size: int = 4, start: int = 0) -> bytes:
    into = bytearray(size)
    try:
        assert source.read("f", 100, start, memoryview(into), lambda _: None) == size
    finally:
        source.close()
    return bytes(into)


GOOD = (206, {"Content-Range": "bytes 0-3/100"}, b"data")


def test_credentials_stay_with_their_origin() -> None:
    with _scripted({"/signed?a=1": GOOD}) as (other, elsewhere):
        moved = (302, {"Location": f"{other}/signed?a=1"}, b"moved")
        with _scripted(
            {"/base/f": moved, "/here/f": (307, {"Location": "/base/g"}, b""), "/base/g": GOOD}
        ) as (
            url,
            home,
        ):
            named = url.replace("http://", "http://me:s%40cret@")
            given = http_source.headers(named, {})
            expected = "Basic " + base64.b64encode(b"me:s@cret").decode()
            assert given == {"Authorization": expected}
            assert _read(http_source.HttpSource(named + "/base/", given)) == b"data"
            assert home.asked == [("/base/f", expected)] and elsewhere.asked == [("/signed?a=1", None)]
            assert _read(http_source.HttpSource(url + "/here", {"Authorization": "x"})) == b"data"
            assert home.asked[-1] == ("/base/g", "x")
            assert redact(named) == url


def test_redirect_is_cached_and_renewed_when_expired() -> None:
    with _scripted({}) as (url, handler):
        handler.script["/f"] = (302, {"Location": f"{url}/signed"}, b"")
        handler.script["/signed"] = GOOD
        source = http_source.HttpSource(url, {})
        _read(source)
        _read(source)
        assert [path for path, _ in handler.asked] == ["/f", "/signed", "/signed"]
        handler.script["/signed"] = (403, {}, b"expired")
        with pytest.raises(SourceUnavailableError, match="403"):
            _read(source)
        handler.script["/signed"] = GOOD
        assert _read(source) == b"data"
        assert [path for path, _ in handler.asked][-2:] == ["/f", "/signed"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((200, {}, b"data"), "does not serve byte ranges"),
        ((404, {}, b""), "404"),
        ((401, {}, b""), "401"),
        ((302, {}, b""), "302"),
        ((302, {"Location": "/f"}, b""), "redirects too many times"),
        ((302, {"Location": "ftp://127.0.0.1/f"}, b""), "ftp"),
        ((206, {}, b"data"), "to a request for bytes 0-3"),
        ((206, {"Content-Range": "bytes 4-7/100"}, b"data"), "4-7/100"),
        ((206, {"Content-Range": "bytes 0-3/99"}, b"data"), "has 99 bytes, but the weights plan has 100"),
        (
            (206, {"Content-Range": "bytes 0-3/100", "Content-Encoding": "gzip"}, b"data"),
            "has a Content-Encoding",
        ),
    ],
)
def test_response_without_a_range_is_refused(answer: tuple[int, dict[str, str], bytes], message: str) -> None:
    with _scripted({"/f": answer}) as (url, _), pytest.raises(SourceUnusableError, match=message):
        _read(http_source.HttpSource(url, {}))


def _certificate(directory: Path) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    files = directory / "certificate.pem", directory / "key.pem"
    files[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    files[1].write_bytes(key.private_bytes(pem, form, plain))
    return files


def test_tls_with_a_trusted_certificate_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = _certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with _scripted({"/f": GOOD}, context) as (url, handler):
        with pytest.raises(SourceUnavailableError, match="certificate"):
            _read(http_source.HttpSource(url, {}))
        assert handler.asked == []
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert _read(http_source.HttpSource(url, {})) == b"data"
        handler.script["/f"] = (302, {"Location": url.replace("https", "http") + "/g"}, b"")
        with pytest.raises(SourceUnusableError, match="without TLS"):
            _read(http_source.HttpSource(url, {}))


def test_an_s3_compatible_store(
    weights: Weights, runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore", exc_type=ImportError)
    shutil.copytree(weights.directory, tmp_path / "b" / "some" / "prefix")
    with serving(tmp_path) as server:
        for name, value in {
            "ENDPOINT_URL": server.url,
            "REGION": "us-east-1",
            "SKIP_SIGNATURE": "true",
        }.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        with client.attach("s3://b/some/prefix", weights.plan, directory=runtime) as attached:
            check_whole(attached, weights)
            assert attached.stats()["fetched_bytes"] == server.total() == sum(map(len, weights.data.values()))
        with (
            client.attach("s3://b/elsewhere", weights.plan, directory=runtime) as attached,
            pytest.raises(client.PrefetchFailedError, match="elsewhere"),
        ):
            attached.complete()


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"1234")
    source = sources.LocalSource(tmp_path)
    try:
        assert source.read("f", 4, 0, memoryview(bytearray(4)), lambda _: None) == 4
        (tmp_path / "f").write_bytes(b"12")
        with pytest.raises(SourceUnusableError, match="has 2 bytes, but the weights plan has 4"):
            source.read("f", 4, 2, memoryview(bytearray(2)), lambda _: None)
    finally:
        source.close()
