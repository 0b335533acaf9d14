"""Reasons for which a graph is not restored, one type each; the caller then captures the graph."""

from __future__ import annotations

from collections.abc import Mapping


class GraphError(Exception):
    """Base of all errors of this package; `hint` names the next step."""

    code = "CS-GRAPH"
    hint = "materialize the model again; the graph is captured normally until then"


class GraphRefusedError(GraphError):
    """A graph cannot be relocated safely; `reason` appears in the report."""

    code = "CS-GRAPH-REFUSED"

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class AlteredTableError(GraphError):
    """The bytes or types of a table differ from the sealed ones."""

    code = "CS-GRAPH-ALTERED"


class MissingKernelError(GraphError):
    """No method found this kernel in the process."""

    code = "CS-GRAPH-KERNEL"


class MissingRegionError(GraphError):
    """This process has no region of this symbol, or one of another size."""

    code = "CS-GRAPH-REGION"


class BaseCollisionError(GraphError):
    """A region has the same address in two captures, so equal words may be pointers or constants."""

    code = "CS-GRAPH-COLLISION"
    hint = "capture the second layout again: the bases must differ"


class NotProvenError(GraphError):
    """The bundle has no proof of these tables."""

    code = "CS-GRAPH-UNPROVEN"
    hint = "run the proof in a third process before publishing"


class DriverError(GraphError):
    """A driver call returned an error; `call` is its name."""

    code = "CS-GRAPH-DRIVER"

    def __init__(self, call: str, result: object) -> None:
        super().__init__(f"{call} returned {result}")
        self.call = call
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
