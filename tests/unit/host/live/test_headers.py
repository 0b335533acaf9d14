"""HTTP headers of an exchange."""

from __future__ import annotations

import pytest

from coldstart.contract.arguments import Arguments
from coldstart.host.live import headers

HOP = [(b"connection", b"close"), (b"transfer-encoding", b"chunked"), (b"te", b"trailers")]


def test_forward_request_drops_what_concerns_the_client_s_connection_alone() -> None:
    given = [
        *HOP,
        (b"host", b"h"),
        (b"content-length", b"3"),
        (b"x-request-id", b"theirs"),
        (b"accept", b"*/*"),
    ]
    number = (b"x-request-id", b"7")
    assert headers.forward_request({"headers": given}, b"7", "") == [(b"accept", b"*/*"), number]
    own = (b"authorization", b"Bearer k")
    assert headers.forward_request({"headers": given}, b"7", "k") == [(b"accept", b"*/*"), own, number]


@pytest.mark.parametrize(
    ("args", "variable", "key"),
    [((), "", ""), (("--api-key", "k"), "", "k"), ((), "v", "v"), (("--api-key", "k", "l"), "v", "k")],
)
def test_find_server_key_takes_the_argument_before_the_variable(
    monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], variable: str, key: str
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", variable)
    assert headers.find_server_key(Arguments(args)) == key


@pytest.mark.parametrize("streams", [True, False])
def test_forward_answer_keeps_a_proxy_from_buffering_when_the_answer_streams(streams: bool) -> None:
    given = [*HOP, (b"Server", b"uvicorn"), (b"X-Own", b"1")]
    buffering = [(b"x-accel-buffering", b"no")] if streams else []
    assert headers.forward_answer(given, streams=streams) == [(b"x-own", b"1"), *buffering]


@pytest.mark.parametrize(
    ("given", "kept"), [(b"client-7", True), (b"", False), (b"x" * 129, False), (b"\xff", False)]
)
def test_choose_request_id_keeps_the_client_s_when_it_can_be_passed_on(given: bytes, kept: bool) -> None:
    number = headers.choose_request_id({"headers": [(b"x-request-id", given)]})
    assert (number == given) == kept and number.isascii() and len(number) <= 128
