"""Killed writers, full disks, read-only stores, flipped bytes, sixteen processes at once."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from coldstart.artifacts import files, sign
from coldstart.artifacts.blobs import blob_path
from coldstart.artifacts.bundle import Bundle, accept_any
from coldstart.artifacts.errors import BundleError, NoSpaceError, ReadOnlyStoreError
from coldstart.artifacts.prune import prune
from coldstart.artifacts.store import Store
from tools.bundles import KV, key, provenance, publish, publish_sections

from coldstart.validate.checks import check


def _child(work: Callable[[], None]) -> int:
    """Fork a process that exits 0 if `work` returns."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return child


def _status(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _small(store: Store, run: int) -> Bundle:
    return publish_sections(store, kv=KV | {"run": run}, stages={"seconds": [run] * 50})


def _check_whole(store: Store) -> int:
    bundles = store.list_bundles()
    assert [bundle.version for bundle in bundles] == sorted({bundle.version for bundle in bundles})
    for bundle in bundles:
        assert check(bundle) == []
    return len(bundles)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [40, pytest.param(200, marks=pytest.mark.nightly)])
def test_store_stays_valid_when_writers_are_killed_at_random(store: Store, kills: int) -> None:
    chance, seen = random.Random(7), 0

    def work() -> None:
        for run in range(10_000):
            _small(store, os.getpid() * 10_000 + run)

    for kill in range(kills):
        child = _child(work)
        # On a loaded machine random kills alone might all come before the first publish.
        while kill % 10 == 0 and len(store.list_bundles()) < 2:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        assert _status(child) == -signal.SIGKILL
        seen = max(seen, _check_whole(store))
        if kill % 10 == 9:
            prune(store.layout, keep=1)
            assert list(store.layout.staging_dir.iterdir()) == []
            assert _check_whole(store) <= 1
    assert seen > 1
    assert check(_small(store, 0)) == []


@pytest.mark.slow
def test_store_stays_valid_when_a_writer_is_killed_at_any_step(store: Store) -> None:
    steps = ("fsync", "rename", "open", "mkdir", "replace", "link")
    _small(store, 0)
    for last in range(1, 200):
        if _status(_child(partial(_die_at, steps, last, store))) == 0:
            break
        assert _check_whole(store) >= 1
    assert 10 < last < 199
    prune(store.layout)
    live = {blob.digest for b in store.list_bundles() for blob in (b.descriptor, *b.image_manifest.blobs)}
    assert len(list(store.layout.blobs_dir.iterdir())) == len(live)


def _die_at(steps: tuple[str, ...], last: int, store: Store) -> None:
    left = [last]

    def dying(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for step in steps:
        setattr(os, step, dying(getattr(os, step)))
    _small(store, last)


@pytest.mark.slow
def test_sixteen_processes_publish_and_read_one_key(store: Store) -> None:
    def work() -> None:
        for run in range(3):
            made = _small(store, os.getpid() * 10 + run)
            found = store.find_by_key(key())
            assert found.version >= made.version and made.read_json("kv") and check(found) == []

    children = [_child(work) for _ in range(16)]
    assert [_status(child) for child in children] == [0] * 16
    assert [bundle.version for bundle in store.list_bundles()] == list(range(1, 49))
    assert _check_whole(store) == 48


def test_sixteen_processes_create_one_host_key(tmp_path: Path) -> None:
    def work() -> None:
        (tmp_path / str(os.getpid())).write_text(sign.load_host_key(tmp_path / "state").fingerprint)

    children = [_child(work) for _ in range(16)]
    assert [_status(child) for child in children] == [0] * 16
    assert len({(tmp_path / str(child)).read_text() for child in children}) == 1
    assert len(list(sign.trust_dir(tmp_path / "state").iterdir())) == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"a small file system cannot be mounted: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def _fill(disk: Path) -> None:
    """Fill the file system."""
    with suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(1024))


def _publish_noise(store: Store, scratch: Path, seed: int) -> Bundle:
    tree = scratch / f"noise-{seed}"
    tree.mkdir()
    (tree / "noise").write_bytes(random.Random(seed).randbytes(200_000))
    with store.open_draft(key()) as draft:
        draft.add_tree("graphs", tree)
        return draft.publish(replace(provenance(), created=f"2026-01-0{seed}T00:00:00Z"))


def test_prune_on_a_full_disk_removes_unreferenced_blobs_first(small_disk: Path, tmp_path: Path) -> None:
    store = Store(small_disk / "store")
    old, new = (_publish_noise(store, tmp_path, seed) for seed in (1, 2))
    garbage = blob_path(store.root, f"sha256:{'0' * 64}")
    garbage.write_bytes(bytes(50_000))
    _fill(small_disk)
    pruned = prune(store.layout, keep=1)
    assert pruned.removed == (old.digest,) and pruned.freed_bytes > 250_000
    assert not garbage.exists() and store.list_bundles() == [new] and check(new) == []


def test_prune_that_cannot_write_the_index_is_completed_by_the_next(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (_publish_noise(store, tmp_path, seed) for seed in (1, 2))
    with monkeypatch.context() as patch, pytest.raises(NoSpaceError):
        patch.setattr(files, "write_atomic", Mock(side_effect=NoSpaceError("no space left")))
        prune(store.layout, keep=1)
    assert store.list_bundles() == [old, new] and check(new) == []
    assert [finding.code for finding in check(old)] == ["CS-BLOB-MISSING"]
    prune(store.layout, keep=1)
    assert store.list_bundles() == [new] and not blob_path(store.root, old.digest).exists()


def test_no_space_at_each_write_leaves_a_valid_store(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    _small(store, 0)
    real, failures = os.fsync, 0
    for last in range(1, 100):
        left = [last]

        def failing(handle: int, left: list[int] = left) -> None:
            left[0] -= 1
            if not left[0]:
                raise OSError(28, "No space left on device")
            real(handle)

        monkeypatch.setattr(os, "fsync", failing)
        try:
            _small(store, last)
        except NoSpaceError:
            failures += 1
            continue
        finally:
            monkeypatch.setattr(os, "fsync", real)
            _check_whole(store)
        break
    assert failures > 5


@pytest.fixture
def read_only(small_disk: Path, tmp_path: Path) -> Store:
    """A store on a file system that is mounted read-only."""
    publish(Store(small_disk / "store"), tmp_path)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    return Store(small_disk / "store")


def test_a_read_only_store_is_read_and_refuses_writes_by_name(read_only: Store, tmp_path: Path) -> None:
    bundle = read_only.find_by_key(key())
    assert read_only.list_bundles() == [bundle] and read_only.find_by_reference(bundle.digest) == bundle
    assert check(bundle) == [] and bundle.read_json("kv") == KV
    bundle.extract_section("compile", tmp_path / "out", trust=accept_any)
    with pytest.raises(ReadOnlyStoreError), read_only.open_draft(key()):
        pass
    with pytest.raises(ReadOnlyStoreError):
        prune(read_only.layout)
    with pytest.raises(ReadOnlyStoreError):
        bundle.extract_section("compile", read_only.root / "out", trust=accept_any)


def test_a_bundle_pruned_under_a_reader_is_a_named_error(store: Store, tmp_path: Path) -> None:
    old = publish(store, tmp_path, run=1)
    publish(store, tmp_path, run=2)
    prune(store.layout, keep=1)
    with pytest.raises(BundleError, match="CS-BLOB-MISSING: "):
        store_read = Store(store.root)
        Bundle(store_read.layout, old.descriptor).read_json("kv")
