"""Checkpoint images of processes that have imported the runtime: location, permission to read them, and removal.

Each interpreter with its package versions has one image without a model, below the cache root. Each bundle whose engine
was checkpointed here has one image with its model (launch/process_snapshot.py).

An image is memory that will run as this user. So it is read only on the machine that created it, from a directory of this
user with mode 0700 whose files are unchanged (file_state.py). fingerprint.py checks whether it fits the installed
software.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from coldstart.artifacts import canonical, files, ownership
from coldstart.system import file_state, fingerprint, runtime

FORMAT = 1
ABOUT = "snapshot.json"
_KIND = "frozen"
_LOCK = ".lock"
PARTIAL = ".partial-"
"""Prefix of the directories of unfinished images."""


@dataclass(frozen=True)
class ProcessImage:
    """Checkpoint image, with its interpreter and vLLM version, creation time (UTC, ISO 8601), and size on disk in bytes.

    `obstacle` is the reason why it cannot be restored here, or None.
    """

    directory: Path
    python: str
    vllm: str
    made: str
    size: int
    obstacle: str | None


def choose_image_directory(root: Path) -> Path:
    """Return the directory below `root` for the image of this interpreter and its packages. The directory can be missing."""
    which = {"executable": sys.executable, **runtime.read_runtime_fields()}
    return root / hashlib.sha256(json.dumps(which, sort_keys=True).encode()).hexdigest()


def choose_engine_image_directory(runtimes: Path, bundle_digest: str) -> Path:
    """Return the directory, next to `runtimes`, for the image of an engine started from a bundle. It can be missing."""
    return runtimes.with_name("snapshots") / bundle_digest.removeprefix("sha256:")


def explain_unreadable(image: Path) -> str | None:
    """Return the reason why the image in the directory `image` must not be read, or None if it may be read."""
    if not image.is_dir():
        return f"{image} does not exist"
    if (reason := ownership.ensure_private_directory(image)) is not None:
        return reason
    if not (stamped := file_state.read_record(_KIND, image, str(FORMAT))):
        return f"{image} was not created on this machine"
    try:
        return file_state.find_change(stamped, image, "created")
    except OSError as error:
        return f"cannot read {image}: {error.strerror}"


@contextmanager
def publish_image(image: Path) -> Iterator[Path]:
    """Yield a private directory for a new image, which replaces `image` when the block ends without an exception.

    Only one image is created at a time; a second caller waits. The directory of a killed process is removed.

    Raises:
        OSError, NoLocksError: The directory cannot be created or locked.
    """
    files.create_private_directory(image.parent)
    with files.hold_lock(image.parent / _LOCK), files.create_owned_directory(image.parent, PARTIAL) as own:
        partial = own / "image"
        partial.mkdir(mode=0o700)
        yield partial
        # Only the owner reads the files, which are on the disk before the directory gets its name.
        for path in partial.iterdir():
            path.chmod(0o600)
            with path.open("rb") as file:
                os.fsync(file.fileno())
        files.sync_directory(partial)
        shutil.rmtree(image, ignore_errors=True)
        partial.rename(image)
        file_state.record_directory(_KIND, image, str(FORMAT))


def list_images(root: Path) -> Iterator[ProcessImage]:
    """Yield a description of every image below `root`, for all interpreters."""
    directories = sorted(root.glob("[0-9a-f]*")) if root.is_dir() else []
    yield from map(describe_image, directories)


def describe_image(directory: Path) -> ProcessImage:
    """Return a description of the image in `directory`, and whether it fits this machine. Raises OSError if it is missing."""
    try:
        about = canonical.read_json(directory / ABOUT)
        python, vllm, made = (str(about[name]) for name in ("python", "vllm", "made"))
    except (OSError, ValueError, KeyError, TypeError):
        python = vllm = made = ""
    reason = explain_unreadable(directory) or fingerprint.find_mismatch(directory, "runtime snapshot")
    return ProcessImage(directory, python, vllm, made, measure_size(directory), reason)


def remove_image(image: Path) -> None:
    """Remove the image in the directory `image`, and its record."""
    shutil.rmtree(image, ignore_errors=True)
    file_state.locate_record(_KIND, image).unlink(missing_ok=True)


def measure_size(path: Path) -> int:
    """Return the disk usage of a file or a directory in bytes."""
    inside = path.rglob("*") if path.is_dir() and not path.is_symlink() else [path]
    return sum(status.st_blocks * 512 for one in inside if (status := one.lstat()))
