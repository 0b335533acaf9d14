"""The HTTP server of a gateway."""

from __future__ import annotations

import re
import socket

import pytest

from coldstart.errors import UsageError
from coldstart.host.endpoint import GatewayEndpoint
from coldstart.host.live.http_server import format_url, listen


def test_listen_names_the_address_and_a_hint_when_the_port_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(UsageError, match=f"cannot listen at 127.0.0.1:{port}") as error,
            listen(GatewayEndpoint(port=port)),
        ):
            pass
        assert str(error.value.message).endswith("another process listens there")
        other = re.fullmatch(r"choose another port: --port (\d+)", str(error.value.hint))
        assert other is not None
        with listen(GatewayEndpoint(port=int(other[1]))):
            pass


def test_listen_names_the_reason_once_when_the_address_is_of_another_machine() -> None:
    endpoint = GatewayEndpoint("192.0.2.77", 0, insecure=True)
    with pytest.raises(UsageError) as error, listen(endpoint):
        pass
    assert error.value.message == "cannot listen at 192.0.2.77:0: Cannot assign requested address"


def test_url_of_is_what_a_client_of_this_machine_writes_when_all_addresses_are_bound() -> None:
    endpoint = GatewayEndpoint("0.0.0.0", 0, insecure=True)
    with listen(endpoint) as sock:
        assert format_url(sock, endpoint) == f"http://127.0.0.1:{sock.getsockname()[1]}"


def test_listen_refuses_a_port_above_65535() -> None:
    with pytest.raises(UsageError, match="99999"), listen(GatewayEndpoint("127.0.0.1", 99999)):
        raise AssertionError("it listens")
