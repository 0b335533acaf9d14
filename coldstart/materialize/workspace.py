"""Work directory of one materialization."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from coldstart.system.proc.locked_directory import owned

_PATIENCE_S = 10.0


def workspace(root: Path) -> AbstractContextManager[Path]:
    """Create a directory of this run below `root`, and remove those of killed runs for any key. Raises OSError."""
    root.mkdir(parents=True, exist_ok=True)
    return owned(root, patience_s=_PATIENCE_S)
