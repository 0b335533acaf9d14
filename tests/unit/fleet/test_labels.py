"""The properties of a server survive as labels of its Ray node."""

from __future__ import annotations

import pytest

from coldstart.errors import UsageError
from coldstart.fleet import labels
from coldstart.fleet.specification import ServerSpec

SERVER = ServerSpec("server", 24 * 10**9, 6.7e9, 12e9, 4)


def test_a_server_is_known_by_its_labels() -> None:
    given = labels.labels(SERVER)
    assert all(len(value) <= 63 and value.isdigit() for value in given.values())
    assert labels.server("server", given) == SERVER
    assert labels.server("head", {"ray.io/node-id": "x"}) is None
    with pytest.raises(UsageError, match="invalid server labels"):
        labels.server("x", {**given, "coldstart-load": "fast"})
