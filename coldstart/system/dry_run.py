"""Dry run: a command reports what it would do, writes no file that outlives it, and uses no network.

What a command computes and stores for later commands, it computes again or leaves out. A model that must be built to be
described is built in a temporary directory.
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
    """Make the block a dry run."""
    with tempfile.TemporaryDirectory(prefix="coldstart-dry-run-") as name:
        token = _directory.set(Path(name))
        try:
            yield
        finally:
            _directory.reset(token)


def find_directory() -> Path | None:
    """Return the temporary directory of the dry run, None outside of one."""
    return _directory.get()


def is_dry_run() -> bool:
    """Return whether this is a dry run."""
    return _directory.get() is not None
