"""Hostile archives are refused with an error code, and the store remains empty."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from coldstart.artifacts import oci
from coldstart.artifacts.archive import export_archive, import_archive
from coldstart.artifacts.errors import BundleError, MissingBlobError, NotALayoutError, TooLargeError
from coldstart.artifacts.store import Store
from tools.bundles import member, plain_tar, publish

from coldstart.validate.checks import check

_LAYOUT = (member(oci.LAYOUT_FILE), oci.LAYOUT)
_INDEX = (member(oci.INDEX_FILE), oci.serialize_index([]))

HOSTILE = {
    "no layout": plain_tar(_INDEX),
    "no index": plain_tar(_LAYOUT),
    "compressed": b"\x1f\x8b" + bytes(600),
    "empty": b"",
    "cut short": plain_tar(_LAYOUT, _INDEX)[:700],
    "other layout version": plain_tar((member("oci-layout"), b'{"imageLayoutVersion":"9"}'), _INDEX),
    "a device for the layout": plain_tar((member("oci-layout", type=tarfile.CHRTYPE), b""), _INDEX),
    "a link for the index": plain_tar(
        _LAYOUT, (member("index.json", type=tarfile.SYMTYPE, linkname="/x"), b"")
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_import_refuses_hostile_archive(name: str, store: Store, tmp_path: Path) -> None:
    (tmp_path / "hostile.tar").write_bytes(HOSTILE[name])
    with pytest.raises(NotALayoutError):
        import_archive(store, tmp_path / "hostile.tar")
    assert store.list_bundles() == []


def test_import_refuses_a_header_that_does_not_fit_into_memory(store: Store, tmp_path: Path) -> None:
    header = member("pax", type=tarfile.XHDTYPE, size=1 << 30).tobuf(tarfile.GNU_FORMAT)
    with (tmp_path / "hostile.tar").open("wb") as file:
        file.write(header)
        file.truncate(1 << 30)
    with pytest.raises(TooLargeError):
        import_archive(store, tmp_path / "hostile.tar")


def test_import_reads_a_blob_from_no_link_and_writes_no_other_member(store: Store, tmp_path: Path) -> None:
    bundle = publish(Store(tmp_path / "made"), tmp_path)
    export_archive([bundle], tmp_path / "good.tar")
    with tarfile.open(tmp_path / "good.tar") as archive:
        members = [(info, archive.extractfile(info).read()) for info in archive]  # type: ignore[union-attr]
    others = [
        (member("../x"), b"x"),
        (member("/etc/x"), b"x"),
        (member("index.json/x"), b"x"),
        (member("blobs", type=tarfile.SYMTYPE, linkname=str(tmp_path / "elsewhere")), b""),
    ]
    (tmp_path / "more.tar").write_bytes(
        plain_tar(*others, *members, (member("x", type=tarfile.CHRTYPE), b""))
    )
    before = sorted(tmp_path.rglob("*"))
    assert import_archive(store, tmp_path / "more.tar") == [bundle] and check(store.list_bundles()[0]) == []
    assert [path for path in sorted(tmp_path.rglob("*")) if not path.is_relative_to(store.root)] == before
    linked = [
        (member(info.name, type=tarfile.SYMTYPE, linkname="/etc/passwd"), b"")
        if "blobs" in info.name
        else (info, data)
        for info, data in members
    ]
    (tmp_path / "linked.tar").write_bytes(plain_tar(*linked))
    with pytest.raises(MissingBlobError):
        import_archive(Store(tmp_path / "other"), tmp_path / "linked.tar")


def test_every_flipped_byte_of_an_archive_is_refused_or_harmless(store: Store, tmp_path: Path) -> None:
    bundle = publish(store, tmp_path)
    export_archive([bundle], tmp_path / "good.tar")
    good = (tmp_path / "good.tar").read_bytes()
    for position in range(0, len(good), 97):
        data = bytearray(good)
        data[position] ^= 0xFF
        (tmp_path / "bad.tar").write_bytes(bytes(data))
        target = Store(tmp_path / f"target-{position}")
        try:
            found = import_archive(target, tmp_path / "bad.tar")
        except BundleError:
            assert target.list_bundles() == []
        else:
            assert all(check(item) == [] for item in found)
