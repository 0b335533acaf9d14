"""Unpacked code that another user wrote or could have written is never used."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from coldstart.artifacts import ownership, sign
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.store import Store
from tools.bundles import CODE, key, provenance, write_tree

from coldstart.models import inspection
from coldstart.system import paths
from coldstart.system.trust.unpacked import unpack_section

GOOD, EVIL = CODE["kernel.so"], b"arbitrary code of another user's"
Attack = Callable[[Path], None]


@pytest.fixture
def bundle(home: Path, store: Store, tmp_path: Path) -> Bundle:
    with store.open_draft(key()) as draft:
        draft.add_tree("compile", write_tree(tmp_path / "code", CODE))
        return draft.publish(provenance(), signer=sign.load_host_key(paths.state_dir()))


def used(bundle: Bundle, root: Path, refused: list[str] | None = None) -> Path:
    return unpack_section(bundle, "compile", root, inspection.trust, refused)


def _overwrite(place: Path) -> None:
    (place / "kernel.so").write_bytes(EVIL)


def _same_size_and_times(place: Path) -> None:
    file = place / "kernel.so"
    before = file.stat()
    file.write_bytes(bytes(len(GOOD)))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def _replace_file(place: Path) -> None:
    (place / "other").write_bytes(EVIL)
    (place / "other").rename(place / "kernel.so")


def _replace_directory(place: Path) -> None:
    place.rename(place.with_name("aside"))
    shutil.copytree(place.with_name("aside"), place)
    _overwrite(place)


def _link(place: Path) -> None:
    place.rename(place.with_name("aside"))
    _overwrite(place.with_name("aside"))
    place.symlink_to(place.with_name("aside"))


def _delete(place: Path) -> None:
    (place / "kernel.so").unlink()


def _open_file(place: Path) -> None:
    (place / "kernel.so").chmod(0o666)


def _open_directory(place: Path) -> None:
    place.chmod(0o777)


def _open_parent(place: Path) -> None:
    place.parent.chmod(0o777)


@pytest.mark.parametrize(
    "attack",
    [
        _overwrite,
        _same_size_and_times,
        _replace_file,
        _replace_directory,
        _link,
        _delete,
        _open_file,
        _open_directory,
        _open_parent,
    ],
)
def test_unpack_replaces_code_when_it_was_changed(bundle: Bundle, attack: Attack) -> None:
    place = used(bundle, paths.Cache.at().unpacked)
    attack(place)
    refused: list[str] = []
    again = used(bundle, paths.Cache.at().unpacked, refused)
    assert (again / "kernel.so").read_bytes() == GOOD and ownership.describe_path_exposure(again) is None
    assert attack is _open_parent or refused
    assert used(bundle, paths.Cache.at().unpacked) == again


def test_unpack_replaces_code_written_while_it_unpacks(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that is exiting writes its compile cache to the directory after the start found it empty."""
    place = paths.Cache.at().unpacked / bundle.find_readable_section("compile").digest.removeprefix("sha256:")
    real, writes = Path.mkdir, []

    def mkdir(self: Path, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        if self.name.endswith(".partial") and not writes:
            writes.append(self)
            real(place)
            (place / "kernel.so").write_bytes(EVIL)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert used(bundle, paths.Cache.at().unpacked) == place and writes
    assert (place / "kernel.so").read_bytes() == GOOD and [one.name for one in place.parent.iterdir()] == [
        place.name
    ]


def test_unpack_uses_private_directory_when_cache_is_world_writable(bundle: Bundle, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o777)
    shared.chmod(0o777)
    digest = bundle.find_readable_section("compile").digest.removeprefix("sha256:")
    write_tree(shared / digest, {"kernel.so": EVIL})
    place = used(bundle, shared)
    assert shared not in place.parents and (place / "kernel.so").read_bytes() == GOOD
    assert stat.S_IMODE(place.stat().st_mode) == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="giving a directory to another user needs root")
def test_unpack_uses_private_directory_when_cache_belongs_to_another_user(
    bundle: Bundle, tmp_path: Path
) -> None:
    foreign = tmp_path / "foreign"
    digest = bundle.find_readable_section("compile").digest.removeprefix("sha256:")
    write_tree(foreign / digest, {"kernel.so": EVIL})
    for path in (foreign, foreign / digest, foreign / digest / "kernel.so"):
        os.chown(path, 64321, 64321)
    place = used(bundle, foreign)
    assert foreign not in place.parents and (place / "kernel.so").read_bytes() == GOOD


def test_unpack_ignores_record_of_another_directory(bundle: Bundle, tmp_path: Path) -> None:
    place = used(bundle, paths.Cache.at().unpacked)
    copy = tmp_path / "copy" / place.name
    shutil.copytree(place, copy)
    _overwrite(copy)
    again = used(bundle, copy.parent)
    assert (again / "kernel.so").read_bytes() == GOOD
