"""Tokens and passwords are not sent over plain HTTP, and presigned queries are not shown in the status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.prefetching import checkpoint, prefetcher
from support.range_server import run_server
from tools.raw_server import answer, answering

from coldstart.contract.environment import PREFETCH_TOKEN
from coldstart.weights.prefetch import client, fetcher, http_source
from coldstart.weights.prefetch.sources import SourceUnusableError, redact

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
