"""Process memory in a bundle is readable by its owner only, and it is exported only with `--include-snapshot`."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from coldstart.artifacts import remote
from coldstart.artifacts.archive import export_archive, import_archive
from coldstart.artifacts.blobs import blob_path
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.store import Store
from tools.bundles import flip, key, provenance, publish, write_tree
from tools.shell import Run

from coldstart.system.paths import Cache


@pytest.fixture(autouse=True)
def _open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def _frozen(store: Store, scratch: Path) -> Bundle:
    with store.begin(key()) as draft:
        draft.add_tree("snapshot", write_tree(scratch / "images", {"pages.img": b"HF_TOKEN=hf_secret"}))
        draft.add_json("kv", {"bytes": 1})
        return draft.publish(provenance())


def _mode(bundle: Bundle, section: str) -> int:
    return stat.S_IMODE(blob_path(bundle.layout.root, bundle.entry(section).digest).stat().st_mode)


def test_store_makes_snapshot_private(store: Store, tmp_path: Path) -> None:
    bundle = _frozen(store, tmp_path)
    assert _mode(bundle, "snapshot") == 0o600 and _mode(bundle, "kv") & 0o044


def test_snapshot_stays_private_when_exported_pushed_or_pulled(store: Store, tmp_path: Path) -> None:
    bundle = _frozen(store, tmp_path)
    archive = tmp_path / "b.tar"
    export_archive([bundle], archive, memory=True)
    assert stat.S_IMODE(archive.stat().st_mode) == 0o600
    (imported,) = import_archive(Store(tmp_path / "imported"), archive)
    pushed = remote.push(bundle, str(tmp_path / "pushed"), memory=True)
    for other in (imported, remote.pull(Store(tmp_path / "pulled"), pushed)):
        assert _mode(other, "snapshot") == 0o600
    flip(blob_path(store.root, bundle.entry("snapshot").digest), 3)
    (again,) = import_archive(store, archive)
    assert again.replaced == 1 and _mode(again, "snapshot") == 0o600


def test_export_and_push_need_include_snapshot(run: Run, home: Path) -> None:
    store = Store(Cache.at().bundles)
    _frozen(store, home)
    for words in (("export", "org/tiny", "--to", "b.tar"), ("push", "org/tiny", "there")):
        refused = run(*words, code=2)
        assert "contains the memory of a process" in refused.stderr and "--include-snapshot" in refused.stderr
        assert not (home / words[-1]).exists()
        run(*words, "--include-snapshot")
        assert (home / words[-1]).exists()


def test_export_needs_no_option_when_bundle_has_no_snapshot(run: Run, home: Path) -> None:
    publish(Store(Cache.at().bundles), home / "s")
    run("export", "org/tiny", "--to", "b.tar")
