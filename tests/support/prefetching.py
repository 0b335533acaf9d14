"""Checkpoints for tests of the prefetcher, and a prefetcher of a test's own."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from coldstart.weights import weights_plan as engine_weights
from coldstart.weights.prefetch import client
from coldstart.weights.prefetch.client import WeightsLease

CHUNK = 64 << 10
FILE = "model.safetensors"


@dataclass(frozen=True)
class Weights:
    """A checkpoint directory, the plan of its files, and their bytes."""

    directory: Path
    plan: dict[str, Any]
    data: dict[str, bytes]

    @classmethod
    def read(cls, directory: Path, chunk: int = CHUNK) -> Weights:
        """Read a directory; the plan has chunks of `chunk` bytes."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine_weights, "CHUNK", chunk)
            plan = engine_weights.build_plan(directory)
        return cls(directory, plan, {path.name: path.read_bytes() for path in sorted(directory.iterdir())})

    def tensor(self, name: str) -> tuple[str, int, int]:
        """Return (file, offset, size) of a tensor."""
        return next(
            (file["name"], tensor["offset"], tensor["size"])
            for file in self.plan["files"]
            for tensor in file["tensors"]
            if tensor["name"] == name
        )

    def names(self, prefix: str = "") -> list[str]:
        """Return the tensor names that begin with `prefix`."""
        return [t["name"] for f in self.plan["files"] for t in f["tensors"] if t["name"].startswith(prefix)]


def write(path: Path, sizes: dict[str, int], seed: int = 1) -> None:
    """Write a safetensors file of random bytes."""
    header, at = {}, 0
    for name, size in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + random.Random(f"{path.name}{seed}").randbytes(at))


def check_whole(attached: WeightsLease, weights: Weights) -> None:
    """Wait for every file and compare all of it."""
    for name, data in weights.data.items():
        attached.wait_for_bytes(name, 0, len(data))
        assert attached.map_file(name) == data


def check_tensors(attached: WeightsLease, weights: Weights, names: list[str]) -> None:
    """Wait for tensors, in this order, and compare them."""
    for name in names:
        file, offset, size = weights.tensor(name)
        attached.wait_for_bytes(file, offset, size)
        assert attached.map_file(file)[offset : offset + size] == weights.data[file][offset : offset + size]


def checkpoint(directory: Path, tensors: int = 8, size: int = CHUNK) -> dict[str, Any]:
    """Write random tensors t0, t1, ... to FILE; return their plan, with a chunk for every stream."""
    directory.mkdir(parents=True, exist_ok=True)
    write(directory / FILE, {f"t{number}": size for number in range(tensors)})
    return Weights.read(directory).plan


def status(directory: Path) -> dict[str, Any]:
    """Return the status of the only prefetcher of this runtime directory."""
    (one,) = client.request("status", directory=directory)
    return one


@contextmanager
def prefetcher(directory: Path, **settings: object) -> Iterator[Path]:
    """Yield the runtime directory of a prefetcher with these environment variables; it ends with the block."""
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
