"""Representation: round trip, memory maps, structural checks, every altered byte."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from coldstart.graphs import table_files
from coldstart.graphs.errors import AlteredTableError
from coldstart.graphs.tables import ARRAYS, Tables, check


def _equal(a: Tables, b: Tables) -> bool:
    return all(np.array_equal(getattr(a, n), getattr(b, n)) for n in ARRAYS) and a.kernels == b.kernels


def test_round_trip_and_memory_map(bundle_directory: Path, tmp_path: Path) -> None:
    tables = table_files.load(bundle_directory)
    binaries = {
        d: table_files.load_binary(bundle_directory, d)
        for d in {k.binary for k in tables.kernels if k.binary}
    }
    table_files.save(tables, tmp_path / "copy", binaries)
    again = table_files.load(tmp_path / "copy")
    assert _equal(tables, again)
    assert isinstance(again.nodes, np.memmap)
    assert again.attributes == tables.attributes and again.regions == tables.regions


@pytest.mark.slow
def test_every_altered_byte_of_every_small_file_is_refused(bundle_directory: Path, tmp_path: Path) -> None:
    """Each file with every n-th byte; the benchmark alters all bytes."""
    for path in [*sorted(bundle_directory.glob("*.npy")), bundle_directory / table_files.MANIFEST]:
        data = path.read_bytes()
        copy = tmp_path / path.name.replace(".", "-")
        shutil.copytree(bundle_directory, copy)
        for at in range(0, len(data), max(1, len(data) // 40)):
            (copy / path.name).write_bytes(data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :])
            with pytest.raises(AlteredTableError):
                table_files.load(copy)
        (copy / path.name).write_bytes(data[: len(data) // 2])
        with pytest.raises(AlteredTableError):
            table_files.load(copy)


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("nodes", "payload", 1 << 30),
        ("nodes", "kernel", 1 << 20),
        ("nodes", "kind", 3),
        ("nodes", "attributes", 900),
        ("nodes", "size", 3),
        ("edges", "source", 1 << 20),
        ("relocations", "place", 1 << 30),
        ("relocations", "region", 60000),
        ("relocations", "offset", 1 << 40),
        ("relocations", "offset", -1),
        ("relocations", "kind", 9),
        ("graphs", "node", 7),
        ("blocks", "length", 1 << 20),
        ("blocks", "region", 60000),
    ],
)
def test_tables_sealed_with_bad_indices_are_refused(
    bundle_directory: Path, table: str, column: str, value: int
) -> None:
    tables = table_files.load(bundle_directory)
    rows = getattr(tables, table).copy()
    rows[column][-1] = value
    setattr(tables, table, rows)
    with pytest.raises(AlteredTableError):
        check(tables)


@pytest.mark.parametrize("version", [1, 99])
def test_another_format_names_both_versions(version: int, bundle_directory: Path, tmp_path: Path) -> None:
    shutil.copytree(bundle_directory, tmp_path / "b")
    manifest = table_files.read_manifest(tmp_path / "b")
    manifest.pop("seal")
    manifest["format"] = version
    manifest["seal"] = table_files.sha256(table_files.canonical(manifest))
    (tmp_path / "b" / table_files.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(AlteredTableError, match=f"has format {version}, but this version reads format 2"):
        table_files.load(tmp_path / "b")


def test_an_altered_binary_is_refused(bundle_directory: Path, tmp_path: Path) -> None:
    shutil.copytree(bundle_directory, tmp_path / "b")
    path = next((tmp_path / "b" / "kernels").iterdir())
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(AlteredTableError):
        table_files.load_binary(tmp_path / "b", path.name)
