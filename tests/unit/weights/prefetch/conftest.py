"""A checkpoint of two small files, its plan with small chunks, a range server, and a prefetcher for each test."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.prefetching import CHUNK, Weights, prefetcher, write
from support.range_server import RangeServer, run_server


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """5 MiB in 2 files: tensors of many sizes, so that chunks and tensors cut each other everywhere."""
    directory = tmp_path_factory.mktemp("weights")
    chance = random.Random(5)
    sizes = [0, 2, CHUNK, 3 * CHUNK + 6, *(2 * chance.randrange(1, CHUNK) for _ in range(48))]
    write(directory / "model-00001.safetensors", {f"a.{n}": size for n, size in enumerate(sizes)})
    write(directory / "model-00002.safetensors", {f"b.{n}": size for n, size in enumerate(sizes[:12])})
    return Weights.read(directory)


@pytest.fixture
def server(weights: Weights) -> Iterator[RangeServer]:
    """Serves the checkpoint."""
    with run_server(weights.directory) as running:
        yield running


@pytest.fixture
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A runtime directory; whatever prefetcher runs there ends with the test."""
    settings = {"MEMORY_BYTES": 64 << 20, "PATIENCE_S": 20, "IDLE_S": 30}
    named = {f"COLDSTART_PREFETCH_{name}": value for name, value in settings.items()}
    with prefetcher(tmp_path_factory.mktemp("rt"), **named) as directory:
        yield directory
