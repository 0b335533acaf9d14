"""Read the files of a model directory: JSON, headers of safetensors files, and the index, which maps tensors to files.

Only regular files are read, with limits on the size and nesting of JSON. Every error names the file and has a hint.

A safetensors file begins with 8 bytes that contain a little-endian length, and JSON of that length. The bytes of the
tensors follow. The safetensors library checks the header: its size, types and shapes, and that the tensors cover the file
without overlap. It does not return the offsets, so they are read from the JSON.

The index takes precedence, as in transformers. vLLM skips the files that the index does not name. It loads every tensor
of the other files in the order of their names, so that a later copy replaces an earlier one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any

import msgspec

from coldstart.artifacts import canonical, files
from coldstart.artifacts.limits import LIMITS
from coldstart.errors import UsageError, describe_reason
from coldstart.system.file_state import cache_by_state

AGAIN = "fetch the model again"
_POINTER = b"version https://git-lfs.github.com/spec/"
"""First bytes of a Git LFS pointer, which replaces a file that was not downloaded."""
INDEXES: Mapping[str, str] = {
    ".safetensors": "model.safetensors.index.json",
    ".bin": "pytorch_model.bin.index.json",
}
_SHOWN = 3
MAX_BYTES = MAX_DIMENSION = 1 << 46
Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]


def require_regular_file(path: Path) -> Path:
    """Return `path`. Raises UsageError if it exists and is not a regular file."""
    if path.is_file() or not os.path.lexists(path):
        return path
    if path.exists():
        raise UsageError(f"{path} is not a regular file", hint=AGAIN)
    raise UsageError(f"{path} is a symbolic link to {path.readlink()}, which does not exist", hint=AGAIN)


def open_file(path: Path) -> BufferedReader:
    """Open a file of a model. Raises FileNotFoundError, and UsageError if it is unreadable or is a Git LFS pointer."""
    try:
        file = files.open_regular(require_regular_file(path))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"cannot read {path}: {describe_reason(error)}", hint=AGAIN) from error
    if file.peek(len(_POINTER)).startswith(_POINTER):
        file.close()
        raise UsageError(
            f"{path} is a Git LFS pointer; its content was not downloaded",
            hint=f"run `git -C {shlex.quote(str(path.parent))} lfs pull`",
        )
    return file


def hash_file(path: Path) -> str:
    """Return the SHA-256 digest of a file in hexadecimal. Raises the errors of `open_file`."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises the errors of `open_file`, and UsageError if the file does not contain a JSON object within the limits.
    """
    with open_file(path) as file:
        data = file.read(LIMITS.json_section_bytes + 1)
    try:
        value = canonical.parse_json(data, source="it")
    except ValueError as error:
        raise UsageError(f"cannot read {path}: {describe_reason(error)}", hint=AGAIN) from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} does not contain a JSON object", hint=AGAIN)
    return value


class Tensor(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tensor: `size` bytes at `offset` in its file. `dtype` is the name that safetensors uses.

    `digest` (sha256:...) is empty if only the header of the file was read. A weights plan does not contain `file`.
    """

    name: str
    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0, le=MAX_DIMENSION)], ...]
    offset: Size
    size: Size
    digest: Annotated[str, msgspec.Meta(pattern=r"^(sha256:[0-9a-f]{64})?\Z")] = ""
    file: str = ""

    @property
    def end(self) -> int:
        """Return the offset of the first byte after the tensor."""
        return self.offset + self.size


def read_header(path: Path) -> list[Tensor]:
    """Return the tensors of a file by offset. Raises OSError, and UsageError for an invalid or truncated safetensors file."""
    from safetensors import SafetensorError

    try:
        return list(_read_header(path))
    except (SafetensorError, ValueError, TypeError, LookupError, AttributeError) as error:
        message = f"{path} is truncated or not a valid safetensors file: {describe_reason(error)}"
        raise UsageError(message, hint=AGAIN) from error


# The key, the checks and the loader of one start each need the header.
@cache_by_state
def _read_header(path: Path) -> list[Tensor]:
    from safetensors import safe_open

    with open_file(path) as file:
        # Read from the descriptor, because the path may become a pipe, and do not map the file, because it may become shorter.
        safe_open(f"/proc/self/fd/{file.fileno()}", "np", backend="pread")
        base = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(base - 8))
    header.pop("__metadata__", None)
    tensors = [
        Tensor(name, one["dtype"], tuple(one["shape"]), base + start, end - start)
        for name, one in header.items()
        for start, end in [one["data_offsets"]]
    ]
    return sorted(tensors, key=lambda entry: (entry.offset, entry.size, entry.name))


def read_index(directory: Path, suffix: str = ".safetensors") -> dict[str, str]:
    """Return the name of the file that contains each tensor according to the directory's index, or {} without an index.

    Raises:
        UsageError: The index is invalid.
    """
    path = directory / INDEXES.get(suffix, "")
    if suffix not in INDEXES or not os.path.lexists(path):
        return {}
    return dict(_read_weight_map(require_regular_file(path)))


@cache_by_state
def _read_weight_map(path: Path) -> dict[str, str]:
    named = read_json_object(path).get("weight_map")
    if not isinstance(named, dict) or not all(file and isinstance(file, str) for file in named.values()):
        raise UsageError(f"{path}: weight_map does not map tensors to files", hint=AGAIN)
    return named


def select_files(directory: Path, files: Sequence[Path]) -> list[Path]:
    """Return the weight files that the directory's index names, as vLLM does, or all weight files if the index names none."""
    safe = bool(files) and files[0].suffix == ".safetensors"
    named = set(read_index(directory).values()) if safe else set()
    return [file for file in files if file.name in named] or list(files)


def list_tensors(file: Path, index: Mapping[str, str]) -> list[Tensor]:
    """Return the tensors of a safetensors file, except copies of tensors that `index` assigns to another file."""
    return [entry for entry in read_header(file) if index.get(entry.name, file.name) == file.name]


def check_weight_files(directory: Path, files: Sequence[Path]) -> None:
    """Check that every file that the index names exists, and that no selected file is truncated, invalid or a Git LFS pointer.

    vLLM itself compares the tensors with the model when it loads them.

    Raises:
        UsageError: A file cannot be loaded.
    """
    suffix = files[0].suffix if files else ""
    named = set(read_index(directory, suffix).values())
    if missing := sorted(name for name in named if not (directory / name).is_file()):
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise UsageError(
            f"cannot load the weights in {directory}: {INDEXES[suffix]} names {', '.join(missing[:_SHOWN])}{more}, which "
            f"{'does' if len(missing) == 1 else 'do'} not exist",
            hint=AGAIN,
        )
    for file in files:
        if suffix == ".safetensors":
            read_header(file)
        else:
            open_file(file).close()


def make_natural_key(name: str) -> list[str | int]:
    """Return a sort key that places shard 10 after shard 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
