"""Record of the bundle stores that use an unpacked section in a directory that all stores of this user share.

A store claims a section when it unpacks or reuses it. `prune` gives the claim up when no bundle of the store has the section.
A shared directory is removed with its last claim. This module does not remove directories.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from coldstart.artifacts import files
from coldstart.system import paths


def claim(digest: str, store: Path) -> None:
    """Record that `store` uses the section with this hexadecimal digest. Raises OSError."""
    place = _claim(digest, store)
    if not place.exists():
        files.make_private(place.parent)
        files.write_atomic(place, os.fsencode(os.path.realpath(store)), mode=0o600)


def is_claimed_alone(digest: str, store: Path) -> bool:
    """Return whether `store` claims the section, and no other store that still exists does."""
    own = _claim(digest, store)
    others = (path for path in own.parent.glob(f"{digest}.*") if path != own)
    return own.exists() and not any(Path(os.fsdecode(files.read_regular(other))).is_dir() for other in others)


def give_up(store: Path, live: set[str]) -> None:
    """Remove the claims of `store` on all sections but those in `live`. Raises OSError."""
    for path in _directory().glob(f"*.{_mark(store)}"):
        if path.stem not in live:
            path.unlink(missing_ok=True)


def _directory() -> Path:
    return paths.state_dir() / "sections"


def _claim(digest: str, store: Path) -> Path:
    return _directory() / f"{digest}.{_mark(store)}"


def _mark(store: Path) -> str:
    return hashlib.sha256(os.fsencode(os.path.realpath(store))).hexdigest()[:16]
