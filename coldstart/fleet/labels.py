"""Conversion between a server's properties and the labels of its Ray node.

Values are plain numbers: a label has at most 63 characters and no spaces.
"""

from __future__ import annotations

from collections.abc import Mapping

from coldstart.errors import UsageError
from coldstart.fleet.specification import ServerSpec

_PREFIX = "coldstart-"
_MEMBERS = ("memory", "network", "load", "devices", "host_memory")


def labels(server: ServerSpec) -> dict[str, str]:
    """Return the labels of a server; rates in whole bytes/s."""
    return {_label(member): str(round(getattr(server, member))) for member in _MEMBERS}


def server(name: str, given: Mapping[str, str]) -> ServerSpec | None:
    """Return the server that a node's labels describe, or None if the node is not a server.

    Raises:
        UsageError: The labels are incomplete or not numbers.
    """
    if _label("memory") not in given:
        return None
    try:
        figures = {member: int(given[_label(member)]) for member in _MEMBERS}
    except (KeyError, ValueError) as error:
        raise UsageError(f"node {name}: invalid server labels: {error}") from error
    return ServerSpec(name, **figures)


def _label(member: str) -> str:
    return _PREFIX + member.replace("_", "-")
