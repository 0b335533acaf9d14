"""Summaries and differences of the `graphs` sections of bundles; nothing of a section is executed."""

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
    """Return counts of nodes, kernels, relocations and refused graphs, and bytes; None if the bundle has no section.

    The result has an "error" if the section cannot be read.
    """
    if not bundle.has("graphs"):
        return None
    try:
        with extract(bundle) as directory:
            return overview.summary(directory)
    except (BundleError, GraphError) as error:
        return {"error": str(error)}


def difference(left: Bundle, right: Bundle) -> dict[str, object] | None:
    """Return the differences between the CUDA graphs of two bundles; None if a section is missing or both are equal.

    Raises BundleError, GraphError.
    """
    if not (left.has("graphs") and right.has("graphs")):
        return None
    if left.entry("graphs").digest == right.entry("graphs").digest:
        return None
    with extract(left) as one, extract(right) as other:
        return overview.diff(one, other)


@contextmanager
def extract(bundle: Bundle) -> Iterator[Path]:
    """Extract the section into a temporary directory, which is deleted on exit. Raises BundleError."""
    with tempfile.TemporaryDirectory(prefix="coldstart-inspect-") as place:
        # The section is read and never loaded, so its source need not be trusted.
        bundle.extract("graphs", Path(place) / "graphs", trust=anyone)
        yield Path(place) / "graphs"
