"""Compare the weight files of a model directory with its index, and select the file that holds each tensor.

This module reads indexes and headers, never weights. The index decides, as in transformers. vLLM skips the files that the index
does not name. It loads every tensor of the other files in the order of their names, so that a later copy replaces an earlier.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from coldstart.errors import UsageError
from coldstart.models import model_files, safetensors
from coldstart.models.safetensors import TensorEntry
from coldstart.system.file_state import cache_by_state

INDEXES: Mapping[str, str] = {
    ".safetensors": "model.safetensors.index.json",
    ".bin": "pytorch_model.bin.index.json",
}
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<end>\.\w+)")
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
        raise UsageError(f"{path}: weight_map does not map tensors to files.", hint=model_files.AGAIN)
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
    """Check that the selected weight files are complete and agree with the index.

    Raises:
        UsageError: A shard is missing, the index is wrong, or a file is truncated, invalid or a pointer.
    """
    if not files:
        return
    suffix = files[0].suffix
    index = read_index(directory, suffix)
    if missing := sorted(name for name in set(index.values()) if not (directory / name).is_file()):
        raise _missing(directory, INDEXES[suffix], missing, index)
    if not index and (missing := _list_missing_shards(files)):
        raise UsageError(
            f"Cannot load the weights in {directory}: missing {_shown(missing)}.",
            hint=model_files.AGAIN,
        )
    if suffix == ".safetensors":
        _check_headers(directory, files, index)
    else:
        for file in files:
            model_files.open_file(file).close()


def _missing(directory: Path, name: str, missing: list[str], index: Mapping[str, str]) -> UsageError:
    hint = model_files.AGAIN
    complete = sorted(directory.glob("*.safetensors")) if name == INDEXES[".safetensors"] else []
    if complete and not _list_missing_shards(complete) and {*index} <= {*_holders(complete)}:
        hint += f"; or, because the other files contain every tensor: rm {directory / name}"
    return UsageError(
        f"Cannot load the weights in {directory}: {name} names {_shown(missing)}, which "
        f"{'does' if len(missing) == 1 else 'do'} not exist.",
        hint=hint,
    )


def _list_missing_shards(files: Sequence[Path]) -> list[str]:
    """Return the names of shards that the numbers of the other shards imply."""
    sets: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for match in filter(None, (_SHARD.fullmatch(file.name) for file in files)):
        sets[match["stem"], match["count"], match["end"]].add(int(match["number"]))
    return [
        f"{stem}-{number:05d}-of-{count}{end}"
        for (stem, count, end), numbers in sorted(sets.items())
        for number in range(1, int(count) + 1)
        if number not in numbers
    ]


def _check_headers(directory: Path, files: Sequence[Path], index: Mapping[str, str]) -> None:
    names = dict[str, set[str]]()
    for file in files:
        held = safetensors.entries(file)
        safetensors.require_complete(file, held)
        names[file.name] = {entry.name for entry in held}
    if lost := sorted(name for name, file in index.items() if name not in names.get(file, {name})):
        raise UsageError(
            f"Cannot load the weights in {directory}: {INDEXES['.safetensors']} assigns {lost[0]} to {index[lost[0]]}, "
            f"which does not contain it{f' (and {len(lost) - 1} more)' if lost[1:] else ''}.",
            hint=model_files.AGAIN,
        )


def describe_copies(directory: Path, files: Sequence[Path]) -> Iterator[str]:
    """Yield a note if vLLM's own loader would load another copy of a tensor than the one that the index names."""
    if not files or files[0].suffix != ".safetensors" or not (index := read_index(directory)):
        return
    holders = _holders(sorted(files, key=lambda file: make_natural_key(file.name)))
    stale = [name for name, held in holders.items() if name in index and held[-1] != index[name]]
    if stale:
        first = stale[0]
        yield (
            f"{len(stale)} tensor(s) are stored in several files, such as {first}: the index assigns it to {index[first]}, "
            f"and vLLM's own loader would load the copy in {holders[first][-1]}"
        )


def _holders(files: Sequence[Path]) -> dict[str, list[str]]:
    """Return the names of the files that contain each tensor, in the order of `files`."""
    found: dict[str, list[str]] = defaultdict(list)
    for file in files:
        for entry in safetensors.entries(file):
            found[entry.name].append(file.name)
    return dict(found)


def make_natural_key(name: str) -> list[str | int]:
    """Return a sort key that orders shard 10 after shard 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
