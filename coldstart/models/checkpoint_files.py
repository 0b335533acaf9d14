"""Compare the weight files of a model directory with its index, and select the file that holds each tensor.

This module reads indexes and headers, never weights. The index decides, as in transformers. vLLM skips the files that the index
does not name. It loads every tensor of the other files in the order of their names, so that a later copy replaces an earlier.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from coldstart.errors import UsageError
from coldstart.models import model_files, safetensors
from coldstart.models.safetensors import TensorEntry
from coldstart.system.file_state import cache_by_state

INDEXES: Mapping[str, str] = {
    ".safetensors": "model.safetensors.index.json",
    ".bin": "pytorch_model.bin.index.json",
}
_SHOWN = 3


def read_index(directory: Path, suffix: str = ".safetensors") -> dict[str, str]:
    """Return the file of each tensor by the directory's index, {} without an index.

    Raises:
        UsageError: The index is invalid.
    """
    path = directory / INDEXES.get(suffix, "")
    if suffix not in INDEXES or not os.path.lexists(path):
        return {}
    return dict(_read_weight_map(model_files.require(path)))


def list_indexes(directory: Path) -> list[Path]:
    """Return the indexes in a model directory, none for a directory without."""
    return [path for path in (directory / name for name in INDEXES.values()) if path.is_file()]


@cache_by_state
def _read_weight_map(path: Path) -> dict[str, str]:
    named = model_files.read_object(path).get("weight_map")
    if not isinstance(named, dict) or not all(file and isinstance(file, str) for file in named.values()):
        raise UsageError(f"{path}: weight_map does not map tensors to files", hint=model_files.AGAIN)
    return named


def select_files(directory: Path, files: Sequence[Path]) -> list[Path]:
    """Return those of a directory's weight files that its index names, as vLLM does; all if it names none of them."""
    safe = bool(files) and files[0].suffix == ".safetensors"
    named = set(read_index(directory).values()) if safe else set()
    return [file for file in files if file.name in named] or list(files)


def entries(file: Path, index: Mapping[str, str]) -> list[TensorEntry]:
    """Return the tensors of a safetensors file without the copies that `index` assigns to another file."""
    return [entry for entry in safetensors.entries(file) if index.get(entry.name, file.name) == file.name]


def check(directory: Path, files: Sequence[Path]) -> None:
    """Check that every file that the index names exists, and that no selected file is truncated, invalid or a pointer.

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
            hint=model_files.AGAIN,
        )
    for file in files:
        if suffix == ".safetensors":
            safetensors.require_complete(file, safetensors.entries(file))
        else:
            model_files.open_file(file).close()


def make_natural_key(name: str) -> list[str | int]:
    """Return a sort key that orders shard 10 after shard 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
