"""A server listens on loopback by default and refuses a port in use."""

from __future__ import annotations

import socket

import pytest

from coldstart.contract.arguments import Arguments
from coldstart.errors import UsageError
from coldstart.launch import listening


@pytest.mark.parametrize(
    ("host", "port", "given", "listen"),
    [
        (None, None, [], ["--host", "127.0.0.1"]),
        (None, 9, [], ["--host", "127.0.0.1", "--port", "9"]),
        ("0.0.0.0", None, [], ["--host", "0.0.0.0"]),
        (None, None, ["--host", "::"], []),
        (None, None, ["--uds", "/run/s"], []),
        (None, None, ["--headless"], []),
    ],
)
def test_choose_address(host: str | None, port: int | None, given: list[str], listen: list[str]) -> None:
    assert listening.choose_address(host, port, Arguments(given)) == listen


def test_choose_address_leaves_port_0_when_the_host_is_not_of_this_machine() -> None:
    assert listening.choose_address("192.0.2.77", 0, Arguments([])) == ["--host", "192.0.2.77", "--port", "0"]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1"])
def test_require_free_port_refuses_one_in_use(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as sock:
        taken = ["--host", host, "--port", str(sock.getsockname()[1])]
        with pytest.raises(UsageError, match="another process listens there"):
            listening.require_free_port(Arguments(), taken)
        with pytest.raises(UsageError, match="another process listens there"):
            listening.require_free_port(Arguments(taken), [])
        listening.require_free_port(Arguments(["--uds", "/run/s"]), taken)
    listening.require_free_port(Arguments(), taken)


@pytest.mark.parametrize(
    ("given", "exposed"),
    [
        ([], True),
        (["--host", "::"], True),
        (["--host", "127.0.0.1"], False),
        (["--uds", "/run/s"], False),
        (["--host", "::", "--api-key", "k"], False),
    ],
)
def test_describe_exposure_warns_when_others_need_no_key(given: list[str], exposed: bool) -> None:
    assert (listening.describe_exposure(Arguments(given), {}) is not None) == exposed
    assert listening.describe_exposure(Arguments(given), {"VLLM_API_KEY": "k"}) is None


@pytest.mark.parametrize(
    ("host", "asked", "answers"),
    [
        ("127.0.0.1", "localhost", True),
        ("localhost", "127.0.0.1", True),
        ("0.0.0.0", "127.0.0.1", True),
        ("0.0.0.0", "0.0.0.0", True),
        ("::", "::1", True),
        ("::", "10.0.0.1", True),
        ("0.0.0.0", "::1", False),
        ("127.0.0.1", "0.0.0.0", False),
        ("127.0.0.1", "10.0.0.1", False),
    ],
)
def test_is_listening(host: str, asked: str, answers: bool) -> None:
    assert listening.is_listening(host, asked) == answers
