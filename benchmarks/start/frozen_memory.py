"""What of a frozen engine's memory is read at each thaw, what is mapped, and how much of that is weights as their files are.

Counted, not timed: a tensor of the checkpoint counts when its bytes stand in the memory one after another; what vLLM has laid
out anew for its kernels (oneDNN's blocked formats) does not, nor what is no weight. Tensors smaller than criu_memory.RUN are
passed over: pages of which a mapping of the model's own file could take the place are made of larger ones.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from coldstart.models import safetensors
from coldstart.models.resolution import weight_files
from coldstart.system.snapshot import criu_memory

# What torch's allocator gives begins at a multiple of this.
ALIGNED = 64


def shares(images: Path, model: Path) -> dict[str, int]:
    """Bytes that are read, that are mapped, and of the mapped those that stand so in the model's files."""
    memory = images / criu_memory.MEMORY
    return {
        "read": sum(file.stat().st_size for file in images.glob("pages-*.img")),
        "mapped": memory.stat().st_size if memory.exists() else 0,
        "as in the files": as_in_files(model, memory) if memory.exists() else 0,
    }


def as_in_files(model: Path, memory: Path) -> int:
    """Bytes of the model's large tensors that stand in `memory`, each counted once."""
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
