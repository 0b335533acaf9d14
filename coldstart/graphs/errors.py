"""Errors that prevent the restore of a graph, so that the caller captures it."""

from __future__ import annotations

from collections.abc import Mapping


class GraphError(Exception):
    """Base class of all errors of coldstart.graphs."""

    code = "CS-GRAPH"


class GraphRefusedError(GraphError):
    """A graph cannot be recorded or restored, because kernels or memory are missing or relocation would be unsafe."""


class AlteredTableError(GraphError):
    """The stored graph files are corrupt: bytes or types differ from the sealed ones."""

    code = "CS-GRAPH-ALTERED"


class NotProvenError(GraphError):
    """The graphs of the bundle are not verified, or their verification failed."""

    code = "CS-GRAPH-UNPROVEN"


class DriverError(GraphError):
    """A driver call returned an error."""

    def __init__(self, call: str, result: object) -> None:
        super().__init__(f"{call} returned {result}")
        self.result = result


def format_reasons(failed: Mapping[str, str]) -> str:
    """Format the reasons in one line, grouped by reason, each with its first graph and the number of other graphs."""
    groups: dict[str, list[str]] = {}
    for key, reason in failed.items():
        groups.setdefault(reason, []).append(key)
    return "; ".join(
        f"{keys[0]}{f' and {len(keys) - 1} more' if keys[1:] else ''}: {reason}"
        for reason, keys in groups.items()
    )
