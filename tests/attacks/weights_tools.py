"""A small checkpoint, its plan, and a prefetcher of the test's own, for attacks on fetching."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from coldstart.weights import weights_plan
from coldstart.weights.prefetch import client

FILE = "model.safetensors"


def checkpoint(directory: Path, tensors: int = 8, size: int = 64 << 10) -> dict[str, Any]:
    """Write random tensors t0, t1, ...; the plan of them."""
    directory.mkdir(parents=True, exist_ok=True)
    spans = {
        f"t{n}": {"dtype": "U8", "shape": [size], "data_offsets": [n * size, (n + 1) * size]}
        for n in range(tensors)
    }
    header = json.dumps(spans).encode()
    data = random.Random(1).randbytes(tensors * size)
    (directory / FILE).write_bytes(struct.pack("<Q", len(header)) + header + data)
    # Chunks of 64 KiB: one model has units for every stream.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights_plan, "CHUNK", 64 << 10)
        return weights_plan.plan(directory)


@contextmanager
def prefetcher(directory: Path, **settings: object) -> Iterator[Path]:
    """The runtime directory of a prefetcher with these settings, as environment variables; it ends with the block."""
    directory.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("AWS_", "HF_", "COLDSTART_"))]:
            patch.delenv(name)
        for name, value in settings.items():
            patch.setenv(name, str(value))
        try:
            yield directory
        finally:
            with suppress(client.PrefetchError):
                client.request("stop", directory=directory)
