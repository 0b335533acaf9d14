"""Errors that prevent a graph from being restored, in which case the caller captures it."""

from __future__ import annotations

from collections.abc import Mapping


class GraphError(Exception):
    """Base class of all errors of coldstart.graphs."""

    code = "CS-GRAPH"


class GraphRefusedError(GraphError):
    """Error for a graph that cannot be recorded or restored, for example because kernels or memory are missing."""


class AlteredTableError(GraphError):
    """Error for graph files that were corrupted or changed after they were sealed."""

    code = "CS-GRAPH-ALTERED"


class NotProvenError(GraphError):
    """Error for graphs that have not been verified or that failed verification."""

    code = "CS-GRAPH-UNPROVEN"


class DriverError(GraphError):
    """Error for a failed call to the CUDA driver, CUPTI or their Python bindings. `result` is the error code, if any."""

    def __init__(self, message: str, result: object = None) -> None:
        super().__init__(message)
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
