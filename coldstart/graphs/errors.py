"""Reasons for which a graph is not restored; the caller then captures the graph."""

from __future__ import annotations

from collections.abc import Mapping


class GraphError(Exception):
    """Base of all errors of this package."""

    code = "CS-GRAPH"


class GraphRefusedError(GraphError):
    """A graph cannot be recorded or restored: its kernels or its memory are missing, or it cannot be relocated safely."""


class AlteredTableError(GraphError):
    """The bytes or types of a table differ from the sealed ones."""

    code = "CS-GRAPH-ALTERED"


class NotProvenError(GraphError):
    """The bundle has no proof of these tables."""

    code = "CS-GRAPH-UNPROVEN"


class DriverError(GraphError):
    """A driver call returned an error."""

    def __init__(self, call: str, result: object) -> None:
        super().__init__(f"{call} returned {result}")
        self.result = result


def format_reasons(failed: Mapping[str, str]) -> str:
    """Return the reasons in one line, each with the first graph that it concerns and the number of others."""
    groups: dict[str, list[str]] = {}
    for key, reason in failed.items():
        groups.setdefault(reason, []).append(key)
    return "; ".join(
        f"{keys[0]}{f' and {len(keys) - 1} more' if keys[1:] else ''}: {reason}"
        for reason, keys in groups.items()
    )
