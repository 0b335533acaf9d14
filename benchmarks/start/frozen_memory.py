"""Bytes of a frozen engine's memory that a thaw reads or maps, and the share that equals the model's files.

The bytes are counted, not timed. A tensor of the checkpoint counts if its bytes are contiguous in memory. Tensors that vLLM has
laid out for its kernels (oneDNN's blocked formats) do not count. Tensors smaller than criu_memory.RUN are skipped, because a
mapping of the model's file could replace the pages of larger ones only.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from coldstart.models import safetensors
from coldstart.models.resolution import weight_files
from coldstart.system.snapshot import criu_memory

# Allocations of torch begin at a multiple of this.
ALIGNED = 64


def shares(images: Path, model: Path) -> dict[str, int]:
    """Return the bytes that are read, mapped, and mapped with the contents of the model's files."""
    memory = images / criu_memory.MEMORY
    return {
        "read": sum(file.stat().st_size for file in images.glob("pages-*.img")),
        "mapped": memory.stat().st_size if memory.exists() else 0,
        "as in the files": as_in_files(model, memory) if memory.exists() else 0,
    }


def as_in_files(model: Path, memory: Path) -> int:
    """Return the bytes of the model's large tensors in `memory`, each counted once."""
    held = np.memmap(memory, np.uint8, "r")
    firsts = held.view(np.uint64)[:: ALIGNED // 8]
    found = 0
    for file in weight_files(model):
        stored = np.memmap(file, np.uint8, "r")
        large = [one for one in safetensors.entries(file) if one.size >= criu_memory.RUN]
        heads = {stored[one.offset : one.offset + 8].tobytes(): one for one in large}
        wanted = np.frombuffer(b"".join(heads), np.uint64)
        seen = set()
        for place in np.flatnonzero(np.isin(firsts, wanted)) * ALIGNED:
            one = heads[held[place : place + 8].tobytes()]
            there = held[place : place + one.size]
            if one.name not in seen and np.array_equal(there, stored[one.offset : one.offset + one.size]):
                seen.add(one.name)
                found += one.size
    return found
