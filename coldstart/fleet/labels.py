"""What a server can, as labels of its Ray node, and back. Values are plain numbers: a label has 63 characters and no spaces."""

from __future__ import annotations

from collections.abc import Mapping

from coldstart.errors import UsageError
from coldstart.fleet.specification import ServerSpec

_PREFIX = "coldstart-"
_MEMBERS = ("memory", "network", "load", "devices", "host_memory")


def labels(server: ServerSpec) -> dict[str, str]:
    """By them a node is known for a server; rates in whole bytes/s."""
    return {_label(member): str(round(getattr(server, member))) for member in _MEMBERS}


def server(name: str, given: Mapping[str, str]) -> ServerSpec | None:
    """The server that these labels describe, None for a node that is none.

    Raises UsageError for labels that describe nothing.
    """
    if _label("memory") not in given:
        return None
    try:
        figures = {member: int(given[_label(member)]) for member in _MEMBERS}
    except (KeyError, ValueError) as error:
        raise UsageError(f"node {name}: its labels describe no server: {error}") from error
    return ServerSpec(name, **figures)


def _label(member: str) -> str:
    return _PREFIX + member.replace("_", "-")
