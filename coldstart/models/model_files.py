"""Read the files of a model directory.

Only regular files are read, with limits on the size and nesting of JSON. Every error names the file and has a hint.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from io import BufferedReader
from pathlib import Path
from typing import Any

from coldstart.artifacts import canonical, files
from coldstart.artifacts.limits import LIMITS
from coldstart.errors import UsageError, describe

AGAIN = "fetch the model again"
_POINTER = b"version https://git-lfs.github.com/spec/"
"""What a file without its content begins with in a clone of a repository."""


def require(path: Path) -> Path:
    """Return `path`. Raises UsageError if it is no regular file; a path that does not exist is accepted."""
    if path.is_file() or not os.path.lexists(path):
        return path
    if path.exists():
        raise UsageError(f"{path} is not a regular file", hint=AGAIN)
    raise UsageError(f"{path} is a link to {path.readlink()}, which does not exist", hint=AGAIN)


def open_file(path: Path) -> BufferedReader:
    """Open a file of a model. Raises FileNotFoundError, and UsageError if it cannot be read or only points to the content."""
    try:
        file = files.open_regular(require(path))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"cannot read {path}: {describe(error)}", hint=AGAIN) from error
    if file.peek(len(_POINTER)).startswith(_POINTER):
        file.close()
        raise UsageError(
            f"{path} is a Git LFS pointer, without the content",
            hint=f"git -C {shlex.quote(str(path.parent))} lfs pull",
        )
    return file


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal. Raises the errors of `open_file`."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises the errors of `open_file`, and UsageError if it is no JSON object within the limits.
    """
    with open_file(path) as file:
        data = file.read(LIMITS.json_section + 1)
    try:
        value = canonical.parse(data, what="it")
    except ValueError as error:
        raise UsageError(f"cannot read {path}: {describe(error)}", hint=AGAIN) from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} is not a JSON object", hint=AGAIN)
    return value
