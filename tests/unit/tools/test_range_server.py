"""The range server of the tests: responses, counts, and requested failures."""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import obstore
import pytest
import requests
from obstore.store import S3Store
from support.range_server import RangeServer, serving
from support.range_settings import FOREVER

DATA = Random(1).randbytes(3 << 20)
NAME = "bucket/w.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bucket").mkdir()
    (tmp_path / NAME).write_bytes(DATA)
    return tmp_path


@pytest.fixture
def server(folder: Path) -> Iterator[RangeServer]:
    with serving(folder) as running:
        yield running


def get(server: RangeServer, wanted: str | None = None, name: str = NAME) -> requests.Response:
    headers = {"Range": f"bytes={wanted}"} if wanted else {}
    return requests.get(f"{server.url}/{name}", headers=headers, timeout=10)


@pytest.mark.parametrize(
    ("wanted", "first", "past"),
    [("0-0", 0, 1), ("5-99", 5, 100), ("3000000-", 3000000, len(DATA)), ("-7", len(DATA) - 7, len(DATA))],
)
def test_a_range_is_served_and_counted(server: RangeServer, wanted: str, first: int, past: int) -> None:
    reply = get(server, wanted)
    assert (reply.status_code, reply.content) == (206, DATA[first:past])
    assert reply.headers["Content-Range"] == f"bytes {first}-{past - 1}/{len(DATA)}"
    (entry,) = server.sent
    assert (entry.file, entry.first, entry.last, entry.bytes) == (NAME, first, past - 1, past - first)


def test_one_connection_serves_many_requests(server: RangeServer) -> None:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
    connection.request("HEAD", f"/{NAME}")
    assert connection.getresponse().read() == b""
    source = connection.sock
    for _ in range(3):
        connection.request("GET", f"/{NAME}")
        assert connection.getresponse().read() == DATA
    assert connection.sock is source
    assert server.total() == 3 * len(DATA) and server.repeated(NAME) == 2 * len(DATA)


@pytest.mark.parametrize(
    ("name", "wanted", "status"), [("none", None, 404), ("../x", None, 404), (NAME, "9999999-", 416)]
)
def test_missing_file_or_range_is_refused(
    server: RangeServer, name: str, wanted: str | None, status: int
) -> None:
    assert get(server, wanted, name).status_code == status
    assert server.total() == 0


def test_the_rate_is_shared_by_all_connections(server: RangeServer) -> None:
    server.settings.rate = 20e6
    begin_s = time.monotonic()
    streams = [requests.get(f"{server.url}/{NAME}", stream=True, timeout=10) for _ in range(2)]
    assert all(stream.content == DATA for stream in streams)
    assert time.monotonic() - begin_s >= 2 * len(DATA) / 20e6 - 0.05  # a lower bound, no timing of ours


def test_down_and_up_on_the_same_port(server: RangeServer) -> None:
    server.settings.rate = 1e6
    stream = requests.get(f"{server.url}/{NAME}", stream=True, timeout=10)
    assert stream.raw.read(1000) == DATA[:1000]
    server.down()
    with pytest.raises(requests.exceptions.ChunkedEncodingError):
        _ = stream.content
    with pytest.raises(requests.exceptions.ConnectionError):
        get(server)
    server.settings.rate = None
    server.up()
    assert get(server, "9-").content == DATA[9:]
    cut, whole = sorted(server.sent, key=lambda entry: entry.first)
    assert 1000 <= cut.bytes < len(DATA) and whole.bytes == len(DATA) - 9


def test_a_cut_response_is_counted_to_the_byte(server: RangeServer) -> None:
    server.settings.cut_after, server.settings.cuts = 70_001, 1
    reply = requests.get(f"{server.url}/{NAME}", stream=True, timeout=10)
    with pytest.raises(requests.exceptions.ChunkedEncodingError):
        _ = reply.content
    assert server.total(NAME) == 70_001
    assert get(server).content == DATA


@pytest.mark.parametrize("times", [2, FOREVER])
def test_a_byte_arrives_inverted(server: RangeServer, times: int) -> None:
    server.settings.flips = [(NAME, 4100, times)]
    wrong = DATA[:4100] + bytes([DATA[4100] ^ 0xFF]) + DATA[4101:]
    assert get(server, "0-4099").content == DATA[:4100]
    assert [get(server).content == wrong for _ in range(3)] == [True, True, times == FOREVER]


def test_refusals_latency_and_whole_files(server: RangeServer) -> None:
    server.settings.refusals = 2
    assert [get(server, "1-2").status_code for _ in range(3)] == [503, 503, 206]
    server.settings.ignore_range = True
    assert (get(server, "1-2").status_code, get(server, "1-2").content) == (200, DATA)


def test_replaced_files_have_another_tag(server: RangeServer) -> None:
    before = get(server, "0-1").headers["ETag"]
    server.settings.version = "2"
    assert get(server, "0-1").headers["ETag"] != before


def test_an_object_store_client_lists_and_reads(server: RangeServer) -> None:
    store = S3Store(
        "bucket",
        endpoint=server.url,
        region="here",
        skip_signature=True,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )
    assert [item["path"] for page in store.list() for item in page] == ["w.safetensors"]
    assert store.head("w.safetensors")["size"] == len(DATA)
    assert bytes(store.get_range("w.safetensors", start=7, end=4000)) == DATA[7:4000]
    assert bytes(obstore.get(store, "w.safetensors").bytes()) == DATA
