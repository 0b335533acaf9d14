"""Dry run: a command reports what it would do, leaves no files behind, and uses no network.

Results that a command would normally store for later commands are recomputed or omitted. If describing a model requires
building it, it is built in a temporary directory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_directory: ContextVar[Path | None] = ContextVar("directory of the dry run", default=None)


@contextmanager
def dry_run() -> Iterator[None]:
    """Run the block as a dry run."""
    with tempfile.TemporaryDirectory(prefix="coldstart-dry-run-") as name:
        token = _directory.set(Path(name))
        try:
            yield
        finally:
            _directory.reset(token)


def find_directory() -> Path | None:
    """Return the temporary directory of the current dry run, or None if no dry run is active."""
    return _directory.get()


def is_dry_run() -> bool:
    """Return whether a dry run is active."""
    return _directory.get() is not None
