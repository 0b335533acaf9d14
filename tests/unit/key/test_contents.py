"""Files of a bundle's trees and differences between bundles, as data."""

from pathlib import Path

import pytest
from coldstart.artifacts.errors import BundleError
from coldstart.artifacts.key import Mismatch
from coldstart.artifacts.store import Store
from tools import bundles

from coldstart.models.contents import SectionFile, compare_bundles, list_files


def test_list_files_returns_each_file_of_each_tree(store: Store, tmp_path: Path) -> None:
    bundle = bundles.publish(store, tmp_path / "scratch")
    found = {name: sorted(files, key=lambda file: file.path) for name, files in list_files(bundle).items()}
    assert found == {
        "compile": [SectionFile("cache/graph.py", 13), SectionFile("kernel.so", 68)],
    }


def test_list_files_reports_a_damaged_blob(store: Store, tmp_path: Path) -> None:
    bundle = bundles.publish(store, tmp_path / "scratch")
    blob = next((tmp_path / "store").rglob(bundle.entry("compile").digest.removeprefix("sha256:")))
    blob.chmod(0o644)
    blob.write_bytes(b"\0" * blob.stat().st_size)
    with pytest.raises(BundleError):
        list_files(bundle)


def test_compare_bundles_names_the_fields_and_sections_that_differ(store: Store, tmp_path: Path) -> None:
    left = bundles.publish(store, tmp_path / "scratch")
    right = bundles.publish(store, tmp_path / "scratch", bundles.key(seed=1), blocks=8)
    found = compare_bundles(left, right)
    assert found.fields == [Mismatch("engine.seed", None, 1)]
    assert found.sections == [Mismatch("kv", left.entry("kv").digest, right.entry("kv").digest)]
    same = compare_bundles(left, left)
    assert (same.fields, same.sections) == ([], [])
