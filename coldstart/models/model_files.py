"""Read the files of a model directory, and recognize what a failed download leaves in the place of one.

Only regular files are read, with limits on the size and nesting of JSON. Every error names the file and has a hint.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from io import BufferedReader
from pathlib import Path
from typing import Any

from coldstart.artifacts import canonical, files
from coldstart.artifacts.limits import LIMITS
from coldstart.errors import UsageError, describe

AGAIN = "fetch the model again"
_HEAD = 512
_POINTER = re.compile(rb"version https://git-lfs\.github\.com/spec/|# xet version|[\w./-]*annex/objects/")
_PAGE = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype|html|\?xml)", re.IGNORECASE)


def require(path: Path) -> Path:
    """Return `path`. Raises UsageError if it is no regular file; a path that does not exist is accepted."""
    if path.is_file() or not os.path.lexists(path):
        return path
    if path.exists():
        raise UsageError(f"{path} is not a regular file.", hint=AGAIN)
    target = os.fspath(path.readlink())
    hint = _get_annexed(path) if "annex/objects/" in target else AGAIN
    raise UsageError(f"{path} is a link to {target}, which does not exist.", hint=hint)


def open_file(path: Path) -> BufferedReader:
    """Open a file of a model. Raises FileNotFoundError, and UsageError if it cannot be read or only points to the content."""
    try:
        file = files.open_regular(require(path))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"cannot read {path}: {describe(error)}.", hint=AGAIN) from error
    if _POINTER.match(head := file.peek(_HEAD)[:_HEAD]):
        file.close()
        store, hint = _explain_pointer(path, head)
        raise UsageError(f"{path} is a {store} pointer, without the content.", hint=hint)
    return file


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal. Raises as `open_file`."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises as `open_file`, and UsageError if it is no JSON object within the limits."""
    with open_file(path) as file:
        data = file.read(LIMITS.json_section + 1)
    try:
        value = canonical.parse(data, what="it")
    except ValueError as error:
        reason, hint = explain(path, error)
        raise UsageError(f"cannot read {path}: {reason}.", hint=hint) from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} is not a JSON object.", hint=AGAIN)
    return value


def explain(path: Path, error: Exception) -> tuple[str, str]:
    """Return why a file is invalid, and a hint: what its first bytes show it to be, or else `error`. Raises as `open_file`."""
    with open_file(path) as file:
        head = file.read(_HEAD)
    if not head:
        return "it is empty", AGAIN
    if _PAGE.match(head):
        return "it is a page of a web site, such as an error or a login", AGAIN
    if head.startswith(b"\x1f\x8b"):
        return "it is compressed with gzip", f"decompress it, or {AGAIN}"
    return describe(error), AGAIN


def _explain_pointer(path: Path, head: bytes) -> tuple[str, str]:
    if head.startswith(b"version"):
        return "Git LFS", f"git -C {shlex.quote(str(path.parent))} lfs pull"
    return ("Xet", AGAIN) if head.startswith(b"#") else ("git-annex", _get_annexed(path))


def _get_annexed(path: Path) -> str:
    return f"cd {shlex.quote(str(path.parent))} && git annex get {shlex.quote(path.name)}"
