"""Representation: round trip, every altered byte."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from coldstart.artifacts import canonical
from support.graphs_tools import seal

from coldstart.graphs import tables as stored
from coldstart.graphs.errors import AlteredTableError
from coldstart.graphs.tables import MANIFEST


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
    document["seal"] = stored.sha256(canonical.dumps(document))
    (copy / MANIFEST).write_text(json.dumps(document))
    with pytest.raises(AlteredTableError, match=reason):
        stored.load(copy)


def test_an_altered_binary_is_refused(bundle_directory: Path, tmp_path: Path) -> None:
    shutil.copytree(bundle_directory, tmp_path / "b")
    path = next((tmp_path / "b" / "kernels").iterdir())
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(AlteredTableError):
        stored.read_by_digest(tmp_path / "b" / "kernels", path.name)
