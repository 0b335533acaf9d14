"""Kernels by reference: found by build id and offset, verified by digest, left to lower rungs otherwise."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.graphs_tools import SMALL, kernel_library

from coldstart.graphs import references, table_files
from coldstart.graphs.errors import MissingKernelError
from coldstart.graphs.restore import Restorer
from tests.support.graphs.model import SimModel

needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@pytest.fixture(scope="module")
def library(bundle_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real shared library with the bundle's binaries inside."""
    images = sorted((bundle_directory / "kernels").iterdir())
    return kernel_library(tmp_path_factory.mktemp("library"), images)


def _binaries(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (directory / "kernels").iterdir()}


@needs_cc
def test_a_bundle_without_binaries_restores_from_the_library(
    bundle_directory: Path, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = table_files.load(bundle_directory)
    tables.report["references"] = references.refer(_binaries(bundle_directory), [library])
    assert len(tables.report["references"]) == 2
    table_files.save(tables, tmp_path / "light", {})
    model = SimModel(SMALL, 51)
    monkeypatch.setattr("coldstart.graphs.restore.loaded_libraries", lambda: [library])
    restorer = Restorer(tmp_path / "light", model.driver, model)
    restorer.link()
    assert restorer.graph("decode:1").restored and set(restorer.ladder.rungs) == {"bundled"}


@needs_cc
def test_another_build_is_not_read(bundle_directory: Path, library: Path, tmp_path: Path) -> None:
    found = references.refer(_binaries(bundle_directory), [library])
    digest = next(iter(found))
    assert table_files.sha256(references.fetch(digest, found, [library])) == digest
    found[digest] |= {"build_id": "00"}
    with pytest.raises(MissingKernelError, match=r"no library .* with build id 00 is loaded"):
        references.fetch(digest, found, [library])
    with pytest.raises(MissingKernelError, match="nor stored by reference"):
        references.fetch("unknown", found, [library])


@needs_cc
def test_changed_library_is_not_used(bundle_directory: Path, library: Path, tmp_path: Path) -> None:
    found = references.refer(_binaries(bundle_directory), [library])
    digest, where = next(iter(found.items()))
    copy = tmp_path / library.name
    data = bytearray(library.read_bytes())
    data[where["offset"] + 200] ^= 1
    copy.write_bytes(data)
    with pytest.raises(MissingKernelError):
        references.fetch(digest, found, [copy])


def test_without_binaries_the_lower_rungs_are_used(bundle_directory: Path, tmp_path: Path) -> None:
    table_files.save(table_files.load(bundle_directory), tmp_path / "light", {})
    model = SimModel(SMALL, 52)
    restorer = Restorer(tmp_path / "light", model.driver, model)
    restorer.link()
    assert restorer.graph("decode:256").restored and "bundled" not in restorer.ladder.rungs


def test_libraries_of_this_process_are_listed() -> None:
    assert any("libc" in path.name for path in references.loaded_libraries())
