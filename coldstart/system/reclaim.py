"""Remove unpacked sections of deleted bundles, which are named by content digest.

Invariant: sections of bundles in the store, and files that a running process has mapped, are never removed.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Leftovers of a dead writer start with the digest too: .DIGEST.PID.old, .DIGEST.UUID.partial.
_NAME = re.compile(r"\.?(?P<digest>[0-9a-f]{64})(\..*)?")


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """Removed (or, in a dry run, removable) directories and records, and their bytes on disk."""

    paths: tuple[Path, ...]
    freed: int


def reclaim(roots: Iterable[Path], live: Collection[str], *, dry_run: bool) -> Reclaimed:
    """Remove entries directly below `roots` whose digest (hexadecimal) is not in `live`, unless a process has mapped them."""
    dead = [path for root in roots for path, digest in _named(root) if digest not in live]
    mapped = _mapped() if dead else set()
    chosen = tuple(path for path in dead if not _in_use(path, mapped))
    freed = sum(size(path) for path in chosen)
    for path in () if dry_run else chosen:
        _remove(path)
    return Reclaimed(chosen, freed)


def _named(root: Path) -> Iterator[tuple[Path, str]]:
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if matched := _NAME.fullmatch(path.name):
            yield path, matched["digest"]


def _mapped() -> set[str]:
    """Return the paths of all files that processes have mapped, as far as this user may read them."""
    paths: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            paths.update(line.partition("/")[2] for line in maps.read_text(errors="replace").splitlines())
    return paths


def _in_use(path: Path, mapped: Collection[str]) -> bool:
    prefix = str(path.resolve()).lstrip("/") + "/"
    return any(name.startswith(prefix) for name in mapped)


def size(path: Path) -> int:
    """Return the bytes that a file or a directory takes on disk."""
    inside = path.rglob("*") if path.is_dir() and not path.is_symlink() else [path]
    return sum(status.st_blocks * 512 for one in inside if (status := one.lstat()))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
