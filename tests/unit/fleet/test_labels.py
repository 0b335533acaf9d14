"""The properties of a server survive as labels of its Ray node."""

from __future__ import annotations

import pytest

from coldstart.errors import UsageError
from coldstart.fleet.live import ray_node
from coldstart.fleet.specification import ServerSpec

SERVER = ServerSpec("server", 24 * 10**9, 6.7e9, 12e9, 4)


def test_a_server_is_known_by_its_labels() -> None:
    given = ray_node.labels(SERVER)
    assert all(len(value) <= 63 and value.isdigit() for value in given.values())
    assert ray_node.server("server", given) == SERVER
    assert ray_node.server("head", {"ray.io/node-id": "x"}) is None
    with pytest.raises(UsageError, match="invalid server labels"):
        ray_node.server("x", {**given, "coldstart-load": "fast"})
