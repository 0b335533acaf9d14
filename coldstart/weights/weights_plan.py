"""The weights plan: where every tensor lies, and what its bytes are.

One pass over each safetensors file hashes tensors and 16 MiB chunks at once: chunks so that ranges can be fetched,
verified and repaired alone, tensors so that an error can name what is damaged. The digest of the plan identifies the
weights by content; it is remembered beside the files' sizes and times, as git's index does, so that it is computed once.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from coldstart.artifacts.files import replacing, write_atomic
from coldstart.errors import UsageError
from coldstart.models import safetensors
from coldstart.models.resolution import weight_files
from coldstart.weights.checkpoint import Checkpoint, CheckpointFile, Tensor

CHUNK = 16 << 20
_READ = 1 << 20


def plan(directory: Path) -> dict[str, Any]:
    """The plan of a model directory: {"chunk": bytes, "files": [{name, size, chunks, tensors}]}.

    A tensor is {name, dtype, shape, offset, size, digest}, offset and size in bytes of the file. A format other than
    safetensors has no tensors, only chunks. Raises OSError, and Usage for a file that is damaged or cut short.
    """
    return _plan(weight_files(directory))


def _plan(files: Iterable[Path]) -> dict[str, Any]:
    return Checkpoint(CHUNK, tuple(map(_file, files))).document()


def digest(weights_plan: Mapping[str, Any]) -> str:
    """sha256 over the plan: equal for equal bytes in files of equal names."""
    text = json.dumps(weights_plan, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def keep(weights_plan: Mapping[str, Any], place: Path) -> tuple[Path, str]:
    """The file below `place` that holds the plan, written where it is not there yet, and its digest. Raises OSError."""
    plan_digest = digest(weights_plan)
    path = place / f"{plan_digest.removeprefix('sha256:')}.json"
    if not path.exists():
        place.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(weights_plan).encode())
    return path, plan_digest


def identity(directory: Path, cache: Path) -> str:
    """`digest(plan(directory))`, computed again only when a file's size, times or inode have changed."""
    files = weight_files(directory)
    stamp = [_stamp(file) for file in files]
    record = cache / f"{hashlib.sha256(os.fsencode(directory.resolve())).hexdigest()[:32]}.json"
    try:
        known = json.loads(record.read_text())
        if known["stamp"] == stamp:
            return str(known["digest"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # never computed, or written by another release: compute
    plan_digest = digest(_plan(files))
    cache.mkdir(parents=True, exist_ok=True)
    with replacing(record, durable=False) as file:
        file.write(json.dumps({"stamp": stamp, "digest": plan_digest}).encode())
    return plan_digest


def _stamp(path: Path) -> list[str | int]:
    status = path.stat()
    return [path.name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _file(path: Path) -> CheckpointFile:
    tensors = _checked(path) if path.suffix == ".safetensors" else []
    hashes = [hashlib.sha256() for _ in tensors]
    chunks: list[str] = []
    with path.open("rb") as file:
        position, chunk = 0, hashlib.sha256()
        while data := file.read(_READ):
            chunk.update(data)
            _feed(tensors, hashes, position, data)
            position += len(data)
            if position % CHUNK == 0:
                chunks.append(chunk.hexdigest())
                chunk = hashlib.sha256()
    if position % CHUNK:
        chunks.append(chunk.hexdigest())
    digests = ("sha256:" + state.hexdigest() for state in hashes)
    named = tuple(replace(tensor, digest=digest) for tensor, digest in zip(tensors, digests, strict=True))
    return CheckpointFile(path.name, position, tuple(chunks), named)


def _feed(tensors: list[Tensor], hashes: list[Any], position: int, data: bytes) -> None:
    view, end = memoryview(data), position + len(data)
    for tensor, state in zip(tensors, hashes, strict=True):
        first, last = max(tensor.offset, position), min(tensor.end, end)
        if first < last:
            state.update(view[first - position : last - position])


def headers(paths: Iterable[Path]) -> dict[str, Any]:
    """A plan without digests, from the headers of safetensors files alone. Raises as `plan`."""
    files = (CheckpointFile(path.name, path.stat().st_size, None, tuple(_checked(path))) for path in paths)
    return Checkpoint(CHUNK, tuple(files)).document()


def _checked(path: Path) -> list[Tensor]:
    entries = safetensors.entries(path)
    end = max((entry.offset + entry.size for entry in entries), default=0)
    if end > (size := path.stat().st_size):
        raise UsageError(
            f"{path.name} is cut short: it has {size} of {end} bytes.", hint="fetch the model again"
        )
    return [Tensor(e.name, path.name, e.offset, e.size, e.dtype, e.shape) for e in entries]
