"""Header of a safetensors file: 8 bytes of little-endian length, then JSON, followed by the tensors' bytes.

It is read without the safetensors library, which would map the complete file. The limit of the header's size is the same.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from coldstart.artifacts import canonical
from coldstart.errors import UsageError, describe
from coldstart.models import model_files
from coldstart.system.file_state import cache_by_state

# `MAX_HEADER_SIZE` in huggingface/safetensors, safetensors/src/tensor.rs.
MAX_HEADER = 100_000_000
# Largest dimension of a tensor, also in a weights plan.
MAX_DIMENSION = 1 << 46
_BITS = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: `size` bytes at `offset` of the file; `dtype` as safetensors spells it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


def entries(path: Path) -> list[TensorEntry]:
    """Return the tensors of a file by offset. Raises OSError, and UsageError for an invalid safetensors file."""
    try:
        return list(_read(path))
    except (ValueError, TypeError, LookupError, AttributeError, struct.error) as error:
        raise UsageError(
            f"{path} is not a valid safetensors file: {describe(error)}", hint=model_files.AGAIN
        ) from error


def require_complete(path: Path, tensors: Iterable[TensorEntry]) -> None:
    """Raise UsageError if the file ends before one of its tensors."""
    end = max((tensor.offset + tensor.size for tensor in tensors), default=0)
    if end > (size := path.stat().st_size):
        raise UsageError(f"{path} is truncated: it has {size} of {end} bytes", hint=model_files.AGAIN)


# Key, checks and loader of one start each need the header.
@cache_by_state
def _read(path: Path) -> list[TensorEntry]:
    with model_files.open_file(path) as file:
        if len(start := file.read(8)) < 8:
            raise ValueError("it is too short for a header")
        (length,) = struct.unpack("<Q", start)
        if length > MAX_HEADER:
            is_text = start.isascii() and start.decode().isprintable()
            raise ValueError(
                f"it begins with the text {start.decode()!r}"
                if is_text
                else f"its header has {length} bytes, the limit is {MAX_HEADER}"
            )
        header = canonical.parse(file.read(length), cap=MAX_HEADER, what="its header")
    header.pop("__metadata__", None)
    tensors = [_entry(name, value, 8 + length) for name, value in header.items()]
    tensors.sort(key=lambda entry: (entry.offset, entry.size, entry.name))
    for before, after in pairwise(tensors):
        if after.offset < before.offset + before.size:
            raise ValueError(f"tensors {before.name!r} and {after.name!r} overlap")
    return tensors


def _entry(name: str, value: Any, base: int) -> TensorEntry:
    start, end = value["data_offsets"]
    shape = tuple(value["shape"])
    if not all(type(number) is int for number in (start, end, *shape)) or not 0 <= start <= end:
        raise ValueError(f"invalid tensor {name!r} with shape {shape} at {start} to {end}")
    dtype, size = str(value["dtype"]), end - start
    # A newer release of safetensors may know more dtypes.
    needs = math.prod(shape) * _BITS[dtype] if dtype in _BITS else size * 8
    if not all(0 <= number <= MAX_DIMENSION for number in shape) or needs != size * 8:
        raise ValueError(f"tensor {name!r} of {size} bytes cannot have shape {shape} and dtype {dtype}")
    return TensorEntry(name, dtype, shape, base + start, size)
