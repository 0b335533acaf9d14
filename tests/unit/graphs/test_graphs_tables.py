"""Representation: round trip, every altered byte."""

from __future__ import annotations  # executed sources of torch inherit this

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from coldstart.artifacts import canonical
from replicas import extension, missing
from support.graphs_tools import seal

from coldstart.graphs import tables as stored
from coldstart.graphs.api import AllocationEvent
from coldstart.graphs.errors import AlteredTableError
from coldstart.graphs.inputs import FINITE, WINDOW, Workload
from coldstart.graphs.tables import MANIFEST
from coldstart.graphs.torch_framework import define_kept_class, pool_segments, trace_events


def test_loaded_tables_are_written_with_equal_bytes(bundle_directory: Path, tmp_path: Path) -> None:
    """So a load loses nothing, and a bundle's digest says whether two are equal. The seal covers all arrays and members."""
    copy = seal(bundle_directory, tmp_path / "copy", stored.load(bundle_directory))
    assert stored.read_manifest(copy).seal == stored.read_manifest(bundle_directory).seal


@pytest.mark.slow
def test_every_altered_byte_of_every_small_file_is_refused(bundle_directory: Path, tmp_path: Path) -> None:
    """Each file with every n-th byte; the benchmark alters all bytes."""
    for path in (bundle_directory / stored.ARRAYS, bundle_directory / MANIFEST):
        data = path.read_bytes()
        copy = tmp_path / path.name.replace(".", "-")
        shutil.copytree(bundle_directory, copy)
        for at in range(0, len(data), max(1, len(data) // 400)):
            (copy / path.name).write_bytes(data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :])
            with pytest.raises(AlteredTableError):
                stored.load(copy)
        (copy / path.name).write_bytes(data[: len(data) // 2])
        with pytest.raises(AlteredTableError):
            stored.load(copy)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"format": 4}, "has format 4, but this version reads format 5"),
        ({"keys": ["decode:1"]}, "."),
        ({"kernels": [{"name": 3}]}, "."),
        ({"regions": "all"}, "."),
    ],
)
def test_a_manifest_that_was_sealed_again_with_another_format_type_or_count_is_refused(
    changes: dict[str, object], reason: str, bundle_directory: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(bundle_directory, tmp_path / "b"))
    document = json.loads((copy / MANIFEST).read_text()) | changes
    del document["seal"]
    document["seal"] = stored.sha256(canonical.serialize(document))
    (copy / MANIFEST).write_text(json.dumps(document))
    with pytest.raises(AlteredTableError, match=reason):
        stored.load(copy)


def test_an_altered_binary_is_refused(bundle_directory: Path, tmp_path: Path) -> None:
    shutil.copytree(bundle_directory, tmp_path / "b")
    path = next((tmp_path / "b" / "kernels").iterdir())
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(AlteredTableError):
        stored.read_by_digest(tmp_path / "b" / "kernels", path.name)


LAYERS = 33
KV = [((n + 1) << 32, 64 << 20) for n in range(LAYERS)]
IDS, OUT = (1 << 20, 64), (1 << 21, 256)


class Writes:
    """Driver that records written bytes; `synchronized` are those at the last wait for the device."""

    def __init__(self) -> None:
        self.held: dict[int, bytes] = {}

    def write(self, address: int, data: bytes) -> None:
        self.held[address] = data

    def fill(self, address: int, size: int, value: int) -> None:
        self.held[address] = bytes([value]) * size

    def read(self, address: int, size: int) -> bytes:
        return self.held.get(address, b"")[:size]

    def synchronize(self) -> None:
        self.synchronized = dict(self.held)


def _prepare(seed: int) -> tuple[Workload, dict[int, bytes]]:
    driver: Any = Writes()
    work = Workload(driver, lambda key: driver.write(IDS[0], b"own"), {"k": OUT}, KV, [(IDS, 4)], 50)
    driver.write(OUT[0], bytes(OUT[1]))
    work.prepare("k", seed)
    # Copies have ended before a graph runs on another stream.
    assert driver.synchronized == driver.held
    return work, driver.held


def test_windows_and_tokens_differ_from_each_other_and_by_the_seed() -> None:
    one, other = _prepare(1)[1], _prepare(2)[1]
    windows = [data for data in one.values() if len(data) == WINDOW]
    assert len(windows) == 2 * LAYERS == len(set(windows))
    assert one == _prepare(1)[1] and not set(windows) & set(other.values())
    assert set(windows[0]) <= set(FINITE.tolist())
    ids = [int.from_bytes(one[IDS[0]][at : at + 4], "little") for at in range(0, IDS[1], 4)]
    assert len(set(ids)) > 1 and set(ids) <= set(range(50))


def test_prepare_overwrites_the_outputs_of_an_earlier_replay() -> None:
    """The captured and the restored graph share their outputs: one that writes nothing must not pass."""
    work, _ = _prepare(1)
    assert work.observe("k")[: OUT[1]] != bytes(OUT[1])


POOL = (0, 7)
ALLOC = {"action": "alloc", "size": 64}
SNAPSHOT = {
    "segments": [
        {"address": address, "total_size": 512, "segment_pool_id": pool}
        for address, pool in ((0x1000, POOL), (0x3000, POOL), (0x5000, (0, 0)))
    ],
    "device_traces": [
        [
            {"action": "segment_alloc", "addr": 0x3000, "size": 512},
            ALLOC | {"addr": 0x5000, "pool_id": (0, 0)},
            ALLOC | {"addr": 0x3000, "pool_id": POOL},
            {"action": "free_requested", "addr": 0x3000, "size": 64},
            {"action": "free_completed", "addr": 0x3000, "size": 64, "pool_id": POOL},
        ]
    ],
}


def test_segments_and_trace_of_a_pool() -> None:
    segments = [(r.symbol, r.base) for r in pool_segments(SNAPSHOT, POOL)]
    assert segments == [("pool:0", 0x1000), ("pool:1", 0x3000)]
    assert trace_events(SNAPSHOT, POOL) == [
        AllocationEvent("alloc", 0x5000, 64),
        AllocationEvent("alloc", 0x3000, 64, pool=True),
        AllocationEvent("free", 0x3000, 64, pool=True),
    ]


@pytest.mark.slow
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_a_kept_graph_can_be_read_however_it_is_made(tmp_path_factory: pytest.TempPathFactory) -> None:
    from torch.cuda import graphs

    base = extension("cuda_graph", tmp_path_factory.mktemp("replica"))._CUDAGraph
    namespace = {**vars(graphs), "_CUDAGraph": base}
    exec(inspect.getsource(graphs.CUDAGraph), namespace)
    plain = namespace["CUDAGraph"]

    def captured(kind: Any, **keywords: Any) -> Any:
        graph = kind(**keywords)
        graph.capture_begin()
        graph.capture_end()
        return graph

    with pytest.raises(RuntimeError, match="keep_graph=true"):
        captured(plain).raw_cuda_graph()
    assert captured(plain, keep_graph=True).raw_cuda_graph()
    for keywords in ({}, {"keep_graph": False}, {"keep_graph": True}):
        graph = captured(define_kept_class(plain), **keywords)
        assert graph.raw_cuda_graph() and isinstance(graph, plain)
        graph.replay()
