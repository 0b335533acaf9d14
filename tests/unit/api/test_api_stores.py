"""`Store`: bundles are listed, pruned with what was unpacked from them, and moved between stores."""

from __future__ import annotations

from pathlib import Path

import pytest
from coldstart.artifacts.bundle import Bundle, accept_any
from coldstart.artifacts.errors import DestinationExistsError
from coldstart.artifacts.store import BundleNotFoundError
from coldstart.artifacts.store import Store as BundleStore
from tools.bundles import NAME, publish

from coldstart.api.bundles import Store
from coldstart.launch import pruning
from coldstart.system.paths import Cache
from coldstart.system.trust import unpacked


@pytest.fixture
def bundles(home: Path, tmp_path: Path) -> list[Bundle]:
    """Two versions of one key in the default store."""
    store = BundleStore(Cache.at().bundles)
    return [publish(store, tmp_path / "scratch", blocks=blocks) for blocks in (1, 2)]


def test_store_lists_and_finds(bundles: list[Bundle]) -> None:
    store = Store()
    assert list(store.list()) == bundles and store.root == Cache.at().bundles
    assert store.get(f"{NAME}:v1") == bundles[0]
    with pytest.raises(BundleNotFoundError):
        store.get("other")


def test_prune_removes_old_versions_and_what_was_unpacked_from_them(bundles: list[Bundle]) -> None:
    place = unpacked.unpack_section(bundles[1], "compile", Cache.at().unpacked, accept_any)
    planned = Store().prune(dry_run=True)
    assert planned.removed == (bundles[0].digest,) and list(Store().list()) == bundles
    assert Store().prune() == planned and list(Store().list()) == [bundles[1]]
    assert planned.unpacked == () and place.is_dir()  # the newest version has that section too
    done = pruning.prune(Cache.at(), [NAME])
    assert done.removed == (bundles[1].digest,)
    assert place in done.unpacked and not any(path.exists() for path in done.unpacked)


def test_archive_carries_bundles_to_another_store(bundles: list[Bundle], tmp_path: Path) -> None:
    file, other = tmp_path / "two.oci.tar", Store(tmp_path / "other")
    size = Store().export_archive([one.ref for one in bundles], file)
    assert size == file.stat().st_size
    with pytest.raises(DestinationExistsError):
        Store().export_archive([NAME], file)
    Store().export_archive([NAME], file, replace=True)
    assert list(other.import_archive(file)) == [bundles[1]] == list(other.list())


def test_push_returns_the_address_that_pull_takes(bundles: list[Bundle], tmp_path: Path) -> None:
    address = Store().push(bundles[0].ref, str(tmp_path / "shared"))
    other = Store(tmp_path / "other")
    assert other.pull(address) == bundles[0] and list(other.list()) == [bundles[0]]
