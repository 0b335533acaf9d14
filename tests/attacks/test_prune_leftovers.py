"""Prune removes what is left over; stores of newer releases and file systems without links or locks are read."""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
from pathlib import Path

import pytest
from coldstart.artifacts import canonical, files, sign
from coldstart.artifacts.bundle import Bundle, accept_any
from coldstart.artifacts.errors import BundleError
from coldstart.artifacts.store import Store
from tools.bundles import NAME, config, key, plant, provenance, publish, write_tree
from tools.shell import Run

from coldstart.launch import pruning
from coldstart.system import paths
from coldstart.system.paths import Cache
from coldstart.system.trust import unpacked
from coldstart.validate.checks import check


@pytest.fixture
def store(home: Path) -> Store:
    return Store(Cache.at().bundles)


def _unpack(bundle: Bundle) -> Path:
    return unpacked.unpack_section(bundle, "compile", Cache.at().unpacked, accept_any)


def _other(store: Store, home: Path) -> Bundle:
    """Publish a later version with other code."""
    with store.open_draft(key()) as draft:
        draft.add_tree("compile", write_tree(home / "other", {"k.so": b"\x7fELF" + bytes(200_000)}))
        return draft.publish(provenance())


def test_prune_removes_unpacked_sections_of_removed_bundles(run: Run, store: Store, home: Path) -> None:
    old = _unpack(publish(store, home / "s"))
    kept = _unpack(_other(store, home))
    planned = json.loads(run("prune", "--dry-run", "--format=json").stdout)
    assert str(old) in planned["unpacked"] and old.is_dir() and planned["freed_bytes"] > 0
    done = json.loads(run("prune", "--format=json").stdout)
    assert done["unpacked"] == planned["unpacked"] and done["freed_bytes"] == planned["freed_bytes"]
    assert not old.exists() and kept.is_dir()
    assert not (paths.state_dir() / "unpacked" / old.name).exists()
    run("prune", "org/tiny")
    assert not kept.exists() and not list(Cache.at().unpacked.glob("[0-9a-f]*"))


def test_prune_retains_the_cache_of_another_store_alone(run: Run, store: Store, home: Path) -> None:
    mine, theirs = publish(store, home / "s"), publish(Store(home / "other" / "bundles"), home / "s")
    roots = (Cache.at().unpacked, home / "other/unpacked", paths.compiled_dir())
    bundles = (mine, theirs, mine)
    places = [
        unpacked.unpack_section(one, "compile", root, accept_any)
        for one, root in zip(bundles, roots, strict=True)
    ]
    run("prune", "org/tiny")
    # What the stores share is unpacked again by the next start of the other one.
    assert [place.is_dir() for place in places] == [False, True, False]
    assert len(list((paths.state_dir() / "unpacked").glob("[0-9a-f]*"))) == 1


def test_prune_retains_files_that_a_process_has_mapped(store: Store, home: Path) -> None:
    place = _unpack(publish(store, home / "s"))
    with (
        (place / "kernel.so").open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ),
    ):
        assert pruning.prune(Cache.at(), ["org/tiny"]).unpacked == () and place.is_dir()
    assert pruning.prune(Cache.at()).unpacked == (place,) and not place.exists()


def test_prune_retains_files_with_other_names(home: Path) -> None:
    root = Cache.at().unpacked
    left = root / f".{'a' * 64}.123.old"
    for name in ("notes", "a" * 63, "A" * 64, ".keep", left.name):
        (root / name).mkdir(parents=True)
    assert pruning.prune(Cache.at()).unpacked == (left,)
    assert len(list(root.iterdir())) == 4


def test_prune_removes_files_of_killed_servers(run: Run, store: Store, home: Path) -> None:
    gone, alive = (paths.runtime_dir() / f"thawed-{name}" for name in ("gone", "alive"))
    scratch = paths.temporary_dir() / "server-12345678"
    for directory in (gone, alive):
        directory.mkdir(parents=True, mode=0o700)
    held = files.try_lock(alive / "lock")
    assert held is not None
    run("prune", "--dry-run")
    assert gone.is_dir()
    # No process holds its lock. Commands of other tests, which run at the same time, remove it, too.
    scratch.mkdir(mode=0o700, exist_ok=True)
    run("prune")
    assert not gone.exists() and not scratch.exists() and alive.is_dir()
    os.close(held)


def _newer(store: Store) -> Bundle:
    """Publish a bundle of format 2.0 with the same key."""
    return plant(store, canonical.dumps(config(format_version="2.0")))


def test_list_shows_all_bundles_when_one_is_newer(run: Run, store: Store, home: Path) -> None:
    mine = publish(store, home / "s")
    newer = _newer(store)
    shown = run("list").stdout
    assert f"{NAME}:v1" in shown and f"{NAME}:v2" in shown and "newer" in shown
    assert run("list", "-q").stdout.split() == [mine.ref, f"{NAME}@{newer.digest}"]
    listed = json.loads(run("list", "--format=json").stdout)["bundles"]
    assert "CS-FORMAT-NEW" in listed[1]["problem"] and listed[0]["digest"] == mine.digest


def test_find_returns_the_readable_bundle_when_another_is_newer(store: Store, home: Path) -> None:
    mine = publish(store, home / "s")
    _newer(store)
    assert store.find_by_key(key()) == mine and store.find_by_reference(NAME) == mine


def test_prune_retains_readable_and_newer_bundle(run: Run, store: Store, home: Path) -> None:
    old = publish(store, home / "s")
    mine = publish(store, home / "s", blocks=9)
    newer = _newer(store)
    run("prune")
    assert store.list_bundles() == [mine, newer] and old not in store.list_bundles()
    assert check(mine) == [] and newer.read_image_manifest()


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_host_key_is_created_without_hard_links(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    made = sign.load_host_key(tmp_path)
    assert sign.load_host_key(tmp_path).fingerprint == made.fingerprint
    path = tmp_path / "signing" / "host.pem"
    assert path.stat().st_mode & 0o077 == 0 and not list(path.parent.glob(".*.partial"))


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_publish_reports_missing_file_locks(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(BundleError) as caught:
        publish(Store(tmp_path / "store"), tmp_path)
    assert caught.value.code == "CS-LOCK" and "--cache-dir" in caught.value.hint


def test_readers_need_no_file_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = publish(Store(tmp_path / "store"), tmp_path)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert Store(tmp_path / "store").list_bundles() == [made] and check(made) == []
