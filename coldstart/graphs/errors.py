"""Every reason for which a graph is not restored, as one type each; the caller always captures instead."""

from __future__ import annotations


class GraphError(Exception):
    """Base of all errors of this package; `hint` names what to do next."""

    code = "CS-GRAPH"
    hint = "materialize the model again; the graph is captured normally until then"


class GraphRefusedError(GraphError):
    """A graph that cannot be relocated safely; `reason` goes into the report."""

    code = "CS-GRAPH-REFUSED"

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class AlteredTableError(GraphError):
    """A table whose bytes, shape or indices are not those that were sealed."""

    code = "CS-GRAPH-ALTERED"


class MissingKernelError(GraphError):
    """No rung of the ladder produced this kernel."""

    code = "CS-GRAPH-KERNEL"


class MissingRegionError(GraphError):
    """A region symbol that this process lacks, or holds with another size."""

    code = "CS-GRAPH-REGION"


class BaseCollisionError(GraphError):
    """Two captures hold one region at one address, so equality proves nothing about its words."""

    code = "CS-GRAPH-COLLISION"
    hint = "capture the second layout again: the bases must differ"


class NotProvenError(GraphError):
    """The bundle carries no proof for these very tables."""

    code = "CS-GRAPH-UNPROVEN"
    hint = "run the proof in a third process before publishing"


class DriverError(GraphError):
    """A driver call that answered with an error; `call` is its name."""

    code = "CS-GRAPH-DRIVER"

    def __init__(self, call: str, result: object) -> None:
        super().__init__(f"{call} answered {result}")
        self.call = call
        self.result = result
