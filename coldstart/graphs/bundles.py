"""The `graphs` section of bundles in a store: looked at, never run."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coldstart.artifacts.bundle import Bundle, anyone
from coldstart.artifacts.errors import BundleError
from coldstart.graphs import overview
from coldstart.graphs.errors import GraphError


def summary(bundle: Bundle) -> dict[str, object] | None:
    """Nodes, kernels, relocations, refusals and bytes of the CUDA graphs; None without a section.

    A section that cannot be read is an "error" in the result. Nothing of it is executed.
    """
    if not bundle.has("graphs"):
        return None
    try:
        with unpacked(bundle) as directory:
            return overview.summary(directory)
    except (BundleError, GraphError) as error:
        return {"error": str(error)}


def difference(left: Bundle, right: Bundle) -> dict[str, object] | None:
    """What the CUDA graphs of two bundles do not share; None unless both have some and they differ.

    Raises BundleError, GraphError.
    """
    if not (left.has("graphs") and right.has("graphs")):
        return None
    if left.entry("graphs").digest == right.entry("graphs").digest:
        return None
    with unpacked(left) as one, unpacked(right) as other:
        return overview.diff(one, other)


@contextmanager
def unpacked(bundle: Bundle) -> Iterator[Path]:
    """The section in a directory that goes away again. Raises BundleError."""
    with tempfile.TemporaryDirectory(prefix="coldstart-inspect-") as place:
        # Looked at, never loaded: nobody has to vouch for it.
        bundle.extract("graphs", Path(place) / "graphs", trust=anyone)
        yield Path(place) / "graphs"
