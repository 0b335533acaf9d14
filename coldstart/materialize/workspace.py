"""The work directory of one run that makes a bundle."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from coldstart.system.proc.locked_directory import owned

_PATIENCE_S = 10.0


def workspace(root: Path) -> AbstractContextManager[Path]:
    """A directory of this run below `root`; those of killed runs, for whatever key, are removed.

    Raises OSError.
    """
    root.mkdir(parents=True, exist_ok=True)
    return owned(root, root.with_suffix(".lock"), patience_s=_PATIENCE_S)
