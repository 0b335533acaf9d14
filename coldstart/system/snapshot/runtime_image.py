"""Images of processes with the runtime imported: where they lie, whose they are, whether they may be read, and their removal.

There is one for each interpreter and its versions, of no model, below the cache root; making and thawing it is
serve/runtime_snapshot.py's. An image is memory that runs as this user. So it is read only where it was made: in a directory of
this user's own with mode 0700, with every file as it was then (stamps.py). What it was made of is fingerprint.py's to judge.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from coldstart.artifacts import files
from coldstart.system import fingerprint, reclaim, runtime
from coldstart.system.trust import directory_fingerprint, ownership

FORMAT = 1
ABOUT = "image.json"
_KIND = "frozen"
_LOCK = ".lock"
_LEFT = ".*.*"


@dataclass(frozen=True)
class Image:
    """One image: `python` and `vllm` are what it was made with, `made` is UTC (ISO 8601), `size` the bytes on disk.

    `obstacle` is why nothing can be thawed from it any more, None where it fits this machine.
    """

    directory: Path
    python: str
    vllm: str
    made: str
    size: int
    obstacle: str | None


def place(root: Path) -> Path:
    """Where below `root` the image for this interpreter and its versions lies, or would."""
    which = {"executable": sys.executable, **runtime.fields()}
    return root / hashlib.sha256(json.dumps(which, sort_keys=True).encode()).hexdigest()


def obstacle(image: Path) -> str | None:
    """Why the image in the directory `image` may not be read, None where it may."""
    if not image.is_dir():
        return f"{image} is not there"
    if (reason := ownership.private(image)) is not None:
        return reason
    try:
        known = json.loads(directory_fingerprint.record(_KIND, image).read_text())
        stamped = known["entries"] if known["format"] == FORMAT else None
    except (OSError, ValueError, KeyError, TypeError):
        stamped = None
    if not stamped:
        return f"{image} was not made here"
    try:
        return directory_fingerprint.change(stamped, image, "made")
    except OSError as error:
        return f"{image} cannot be read: {error.strerror}"


@contextmanager
def published(image: Path) -> Iterator[Path]:
    """A private directory for a new image, which takes the place of `image` when the block ends. Nothing stays where it raises.

    One at a time: whoever comes second waits. What makers that were killed have left is removed. Raises OSError, NoLocksError.
    """
    root = image.parent
    files.make_private(root)
    with files.locked(root / _LOCK):
        _sweep(root)
        partial = root / f".{image.name}.{uuid.uuid4().hex}.partial"
        partial.mkdir(mode=0o700)
        try:
            yield partial
            _seal(partial)
            _replace(image, partial)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        record = directory_fingerprint.record(_KIND, image)
        files.make_private(record.parent)
        files.write_atomic(
            record,
            json.dumps({"format": FORMAT, "entries": directory_fingerprint.of(image)}).encode(),
            mode=0o600,
        )


def _seal(directory: Path) -> None:
    """Every file its owner's alone, and on the disk before it has its name."""
    for path in directory.iterdir():
        path.chmod(0o600)
        with path.open("rb") as file:
            files.sync_file(file)
    files.sync_directory(directory)


def _replace(image: Path, partial: Path) -> None:
    aside = image.with_name(f".{image.name}.{uuid.uuid4().hex}.old")
    if image.exists():
        image.rename(aside)
    partial.rename(image)
    shutil.rmtree(aside, ignore_errors=True)


def _sweep(root: Path) -> None:
    for left in root.glob(_LEFT):
        shutil.rmtree(left, ignore_errors=True)


def listed(root: Path) -> Iterator[Image]:
    """Every image below `root`, whatever interpreter it is of."""
    directories = sorted(root.glob("[0-9a-f]*")) if root.is_dir() else []
    yield from map(described, directories)


def described(directory: Path) -> Image:
    """What the image in `directory` says of itself, and whether it fits. Raises OSError where there is none."""
    try:
        about = json.loads((directory / ABOUT).read_text())
        python, vllm, made = (str(about[name]) for name in ("python", "vllm", "made"))
    except (OSError, ValueError, KeyError, TypeError):
        python = vllm = made = ""
    reason = obstacle(directory) or fingerprint.obstacle(directory, "runtime snapshot")
    return Image(directory, python, vllm, made, reclaim.size(directory), reason)


def discard(image: Image) -> None:
    """Remove an image and what is known of it."""
    shutil.rmtree(image.directory, ignore_errors=True)
    directory_fingerprint.record(_KIND, image.directory).unlink(missing_ok=True)


def prune(root: Path, *, dry_run: bool) -> reclaim.Reclaimed:
    """Remove the images from which nothing can be thawed any more, and what makers that were killed have left."""
    dead = [image for image in listed(root) if image.obstacle is not None]
    left, left_bytes = _left(root, dry_run=dry_run)
    for image in () if dry_run else dead:
        discard(image)
    freed = sum(image.size for image in dead) + left_bytes
    return reclaim.Reclaimed((*(image.directory for image in dead), *left), freed)


def _left(root: Path, *, dry_run: bool) -> tuple[list[Path], int]:
    """What makers that were killed have left (and its bytes on disk), removed; nothing while one is being made."""
    try:
        held = files.try_lock(root / _LOCK) if root.is_dir() else None
    except OSError:
        held = None
    if held is None:
        return [], 0
    left = list(root.glob(_LEFT))
    freed = sum(map(reclaim.size, left))
    if not dry_run:
        _sweep(root)
    os.close(held)
    return left, freed
