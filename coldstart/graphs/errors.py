"""Errors that prevent a graph from being restored, in which case the caller captures it."""

from __future__ import annotations

from collections.abc import Mapping


class GraphError(Exception):
    """Base class of all errors of coldstart.graphs."""

    code = "CS-GRAPH"


class GraphRefusedError(GraphError):
    """A graph cannot be recorded or restored: kernels or memory are missing, or a relocation would be unsafe."""


class AlteredTableError(GraphError):
    """The stored graph files are corrupt: their bytes or types differ from those that were sealed."""

    code = "CS-GRAPH-ALTERED"


class NotProvenError(GraphError):
    """The graphs in the bundle have not been verified, or their verification failed."""

    code = "CS-GRAPH-UNPROVEN"


class DriverError(GraphError):
    """A call to the CUDA driver, CUPTI or their Python bindings failed."""

    def __init__(self, call: str, result: object) -> None:
        super().__init__(f"{call} returned {result}")
        self.result = result


def format_reasons(failed: Mapping[str, str]) -> str:
    """Format the reasons on one line: each distinct reason with its first graph and the number of other graphs."""
    groups: dict[str, list[str]] = {}
    for key, reason in failed.items():
        groups.setdefault(reason, []).append(key)
    return "; ".join(
        f"{keys[0]}{f' and {len(keys) - 1} more' if keys[1:] else ''}: {reason}"
        for reason, keys in groups.items()
    )
