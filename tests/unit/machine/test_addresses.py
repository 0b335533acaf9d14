"""Addresses that a client of this machine can use: the standard library takes each apart again."""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit

import pytest

from coldstart.machine import addresses


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "127.0.0.1", "::1", "10.1.2.3", "fe80::1"])
def test_a_url_names_where_to_connect(host: str) -> None:
    parts = urlsplit(addresses.url(host, 8000))
    found = ip_address(str(parts.hostname))
    given = ip_address(host)
    assert parts.port == 8000 and str(found) == addresses.reachable(host)
    assert (found.is_loopback and found.version == given.version) if given.is_unspecified else found == given


def test_a_name_stays_and_so_does_the_scheme() -> None:
    assert addresses.url("gpu-3.example", 443, "https") == "https://gpu-3.example:443"
