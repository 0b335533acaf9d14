"""Build the weights plan of a model directory and compute its digest.

One pass over each safetensors file hashes tensors and 16 MiB chunks. A chunk digest verifies one byte range without the
rest of the file. A tensor digest verifies a tensor even if the chunks that it overlaps were fetched in part.

The digest of the plan identifies the weights by content. It is cached together with the sizes and times of the files, as
in git's index, so that unchanged files are hashed only once.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from coldstart.artifacts import canonical
from coldstart.artifacts.files import open_regular, open_replacement, write_atomic
from coldstart.models import checkpoint_files
from coldstart.models.resolution import weight_files
from coldstart.system.dry_run import is_dry_run
from coldstart.system.file_state import read_state
from coldstart.weights.checkpoint import Checkpoint, CheckpointFile

CHUNK = 16 << 20
# Number of files that are read at the same time.
_FILES = 4


def build_plan(directory: Path, records: Path | None = None) -> dict[str, Any]:
    """Return the plan of a model directory: {"chunk": bytes, "files": [{name, size, chunks, tensors}]}.

    A tensor is {name, dtype, shape, offset, size, digest}, with offset and size in bytes. A file that is not in
    safetensors format has chunks but no tensors. If the directory `records` is given, the digest of the plan is recorded
    there for `read_or_compute_digest`.

    Raises:
        OSError: A file cannot be read, or the record cannot be written.
        UsageError: A safetensors file is damaged or truncated.
    """
    files, stamp = weight_files(directory), _stamp(directory)
    with ThreadPoolExecutor(_FILES) as pool:
        index = checkpoint_files.read_index(directory)
        hashed = tuple(pool.map(lambda file: _file(file, index), files))
    made = Checkpoint(CHUNK, hashed).document()
    if records is not None and stamp == _stamp(directory):  # otherwise, a file changed while it was read
        records.mkdir(parents=True, exist_ok=True)
        with open_replacement(_record(directory, records), durable=False) as file:
            file.write(json.dumps({"stamp": stamp, "digest": compute_digest(made)}).encode())
    return made


def compute_digest(weights_plan: Mapping[str, Any]) -> str:
    """Return the SHA-256 digest of the plan. Plans of files with equal names and bytes have equal digests."""
    text = json.dumps(weights_plan, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def find_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return the name of the first tensor whose contents differ between two plans, or "" if all contents are equal.

    A file that is not in safetensors format is compared as a whole.
    """
    return min((name for name, _ in _contents(one) ^ _contents(other)), default="")


def _contents(weights_plan: Mapping[str, Any]) -> set[tuple[str, str]]:
    files = weights_plan["files"]
    tensors = {(tensor["name"], tensor["digest"]) for file in files for tensor in file["tensors"]}
    return tensors | {(file["name"], " ".join(file["chunks"])) for file in files if not file["tensors"]}


def save_plan(weights_plan: Mapping[str, Any], place: Path) -> Path:
    """Write the plan below `place` if it is missing there, but not in a dry run. Return its path. Raises OSError."""
    path = place / f"{compute_digest(weights_plan).removeprefix('sha256:')}.json"
    if not path.exists() and not is_dry_run():
        place.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(weights_plan).encode())
    return path


def read_or_compute_digest(directory: Path, records: Path) -> str:
    """Return the digest of a directory's plan. Compute it only if the size, time or inode of a file or the index has changed.

    A dry run computes nothing, and returns "" for a digest that is not known.

    Args:
        directory: Model directory.
        records: Directory of the recorded digests.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):  # no record, or a record of another release
        known = canonical.read_json(_record(directory, records))
        if known["stamp"] == _stamp(directory):
            return str(known["digest"])
    return "" if is_dry_run() else compute_digest(build_plan(directory, records))


def _record(directory: Path, records: Path) -> Path:
    return records / f"{hashlib.sha256(os.fsencode(directory.resolve())).hexdigest()[:32]}.json"


def _stamp(directory: Path) -> list[list[str | int]]:
    # The index decides which copy of a tensor is loaded, so a change to it changes the weights.
    indexes = (directory / name for name in checkpoint_files.INDEXES.values())
    files = (*weight_files(directory), *filter(Path.is_file, indexes))
    return [[path.name, *read_state(path)] for path in files]


def digest_stamp(directory: Path) -> str:
    """Return a digest of the sizes, times and inodes of a directory's weight files, which changes when a file is replaced."""
    return hashlib.sha256(json.dumps(_stamp(directory)).encode()).hexdigest()


def _file(path: Path, index: Mapping[str, str]) -> CheckpointFile:
    tensors = checkpoint_files.list_tensors(path, index) if path.suffix == ".safetensors" else []
    digests, chunks, whole = dict[str, str](), list[str](), hashlib.sha256()
    # A long tensor and its chunks are hashed at the same time, because hashlib releases the GIL.
    with open_regular(path) as file, ThreadPoolExecutor(1) as beside:
        bare = CheckpointFile(path.name, os.fstat(file.fileno()).st_size, tuple(tensors))
        for start, end, tensor in bare.spans(CHUNK):
            data = file.read(end - start)
            is_part = tensor is not None and end - start < tensor.size
            fed = beside.submit(whole.update, data) if is_part else None
            chunks.append(hashlib.sha256(data).hexdigest())
            if fed is not None:
                fed.result()
            if tensor is not None and end == tensor.end:
                digests[tensor.name] = whole.hexdigest() if is_part else chunks[-1]
                whole = hashlib.sha256()
    empty = hashlib.sha256().hexdigest()
    named = (replace(one, digest="sha256:" + digests.get(one.name, empty)) for one in tensors)
    return replace(bare, chunks=tuple(chunks), tensors=tuple(named))


def build_plan_from_headers(paths: Iterable[Path]) -> dict[str, Any]:
    """Return a plan without digests, from the headers of safetensors files in one directory.

    Raises the errors of `build_plan`.
    """
    files = list(paths)
    index = checkpoint_files.read_index(files[0].parent) if files else {}
    listed = (
        CheckpointFile(p.name, p.stat().st_size, tuple(checkpoint_files.list_tensors(p, index)))
        for p in files
    )
    return Checkpoint(CHUNK, tuple(listed)).document()
