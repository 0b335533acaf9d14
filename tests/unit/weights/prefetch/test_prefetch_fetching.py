"""Bytes that arrive: all, some, from each kind of source; each byte once."""

import base64
import json
import shutil
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.certificates import write_certificate
from support.prefetching import Weights, check_whole, status
from support.range_server import RangeServer, run_server
from tools.raw_server import RawServer, answer, answering

from coldstart.weights.prefetch import PrefetchFailedError, client, http_source, sources
from coldstart.weights.prefetch.sources import SourceUnavailableError, SourceUnusableError, redact_address


def test_a_local_directory_is_mapped_itself(weights: Weights, runtime: Path) -> None:
    with client.attach(str(weights.directory), weights.plan, directory=runtime) as attached:
        check_whole(attached, weights)
        assert status(runtime)["memory_bytes"] == 0


def test_early_fetch_lasts_until_one_attaches(weights: Weights, server: RangeServer, runtime: Path) -> None:
    with (
        client.start_early_fetch(server.url, weights.plan, directory=runtime),
        client.attach(server.url, weights.plan, directory=runtime) as attached,
    ):
        check_whole(attached, weights)
        assert status(runtime)["leases"] == 1
    assert server.total() == sum(map(len, weights.data.values()))


@pytest.mark.slow
def test_twenty_workers_share_one_copy(weights: Weights, server: RangeServer, runtime: Path) -> None:
    server.settings.rate = 20e6
    with futures.ThreadPoolExecutor(20) as pool:
        runs = [pool.submit(_worker, server.url, weights, runtime) for _ in range(20)]
        assert [run.result() for run in runs] == [0] * 20
    assert server.total() == sum(map(len, weights.data.values()))
    assert status(runtime)["ready_bytes"] == server.total()


def _worker(url: str, weights: Weights, runtime: Path) -> int:
    code = (
        "import json, sys, pathlib\n"
        "from coldstart.weights.prefetch import client\n"
        "url, plan, runtime, weights = sys.argv[1:]\n"
        "plan = json.loads(pathlib.Path(plan).read_text())\n"
        "with client.attach(url, plan, directory=pathlib.Path(runtime)) as attached:\n"
        "    for file in plan['files']:\n"
        "        attached.wait_for_bytes(file['name'], 0, file['size'])\n"
        "        assert attached.map_file(file['name']) == pathlib.Path(weights, file['name']).read_bytes()\n"
    )
    plan = runtime / f"plan-{threading.get_ident()}.json"
    plan.write_text(json.dumps(weights.plan))
    arguments = [url, str(plan), str(runtime), str(weights.directory)]
    return subprocess.run([sys.executable, "-c", code, *arguments], check=False).returncode


Script = dict[str, tuple[int, dict[str, str], bytes]]


@contextmanager
def _scripted(script: Script, context: ssl.SSLContext | None = None) -> Iterator[tuple[str, RawServer]]:
    """Serve (status, headers, body) for each path, and yield the URL and the server."""
    with answering(
        lambda c, asked: answer(c, *script.get(asked.path, (404, {}, b""))), context=context
    ) as server:
        yield server.url.replace("http:", "https:" if context else "http:"), server


def _asked(server: RawServer) -> list[tuple[str, str | None]]:
    return [(one.path, one.headers.get("authorization")) for one in server.asked]


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
        ) as (url, home):
            named = url.replace("http://", "http://me:s%40cret@")
            given = http_source.headers(named, {})
            expected = "Basic " + base64.b64encode(b"me:s@cret").decode()
            assert given == {"Authorization": expected}
            assert _read(http_source.HttpSource(named + "/base/", given)) == b"data"
            assert _asked(home) == [("/base/f", expected)] and _asked(elsewhere) == [("/signed?a=1", None)]
            assert _read(http_source.HttpSource(url + "/here", {"Authorization": "x"})) == b"data"
            assert _asked(home)[-1] == ("/base/g", "x")
            assert redact_address(named) == url


def test_redirect_is_cached_and_renewed_when_expired() -> None:
    script: Script = {}
    with _scripted(script) as (url, server):
        script["/f"] = (302, {"Location": f"{url}/signed"}, b"")
        script["/signed"] = GOOD
        source = http_source.HttpSource(url, {})
        _read(source)
        _read(source)
        assert [path for path, _ in _asked(server)] == ["/f", "/signed", "/signed"]
        script["/signed"] = (403, {}, b"expired")
        with pytest.raises(SourceUnavailableError, match="403"):
            _read(source)
        script["/signed"] = GOOD
        assert _read(source) == b"data"
        assert [path for path, _ in _asked(server)][-2:] == ["/f", "/signed"]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ((200, {}, b"data"), "does not serve byte ranges"),
        ((404, {}, b""), "404"),
        ((401, {}, b""), "401"),
        ((302, {}, b""), "302"),
        ((302, {"Location": "/f"}, b""), "redirects too many times"),
        ((302, {"Location": "ftp://127.0.0.1/f"}, b""), "ftp"),
        ((206, {}, b"data"), "for a request of bytes 0-3"),
        ((206, {"Content-Range": "bytes 4-7/100"}, b"data"), "4-7/100"),
        ((206, {"Content-Range": "bytes 0-3/99"}, b"data"), "has 99 bytes, but the weights plan expects 100"),
        (
            (206, {"Content-Range": "bytes 0-3/100", "Content-Encoding": "gzip"}, b"data"),
            "returned a Content-Encoding",
        ),
    ],
)
def test_response_without_a_range_is_refused(said: tuple[int, dict[str, str], bytes], message: str) -> None:
    with _scripted({"/f": said}) as (url, _), pytest.raises(SourceUnusableError, match=message):
        _read(http_source.HttpSource(url, {}))


def test_tls_with_a_trusted_certificate_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = write_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    script: Script = {"/f": GOOD}
    with _scripted(script, context) as (url, server):
        with pytest.raises(SourceUnavailableError, match="certificate"):
            _read(http_source.HttpSource(url, {}))
        assert server.asked == []
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert _read(http_source.HttpSource(url, {})) == b"data"
        script["/f"] = (302, {"Location": url.replace("https", "http") + "/g"}, b"")
        with pytest.raises(SourceUnusableError, match="from https to http"):
            _read(http_source.HttpSource(url, {}))


def test_s3_store(weights: Weights, runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore", exc_type=ImportError)
    shutil.copytree(weights.directory, tmp_path / "b" / "some" / "prefix")
    with run_server(tmp_path) as server:
        for name, value in {
            "ENDPOINT_URL": server.url,
            "REGION": "us-east-1",
            "SKIP_SIGNATURE": "true",
        }.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        with client.attach("s3://b/some/prefix", weights.plan, directory=runtime) as attached:
            check_whole(attached, weights)
            assert (
                attached.query_stats()["fetched_bytes"]
                == server.total()
                == sum(map(len, weights.data.values()))
            )
        with (
            client.attach("s3://b/elsewhere", weights.plan, directory=runtime) as attached,
            pytest.raises(PrefetchFailedError, match="elsewhere"),
        ):
            attached.wait_for_tensors()


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"1234")
    source = sources.LocalSource(tmp_path)
    try:
        assert source.read("f", 4, 0, memoryview(bytearray(4)), lambda _: None) == 4
        (tmp_path / "f").write_bytes(b"12")
        with pytest.raises(SourceUnusableError, match="has 2 bytes, but the weights plan expects 4"):
            source.read("f", 4, 2, memoryview(bytearray(2)), lambda _: None)
    finally:
        source.close()
