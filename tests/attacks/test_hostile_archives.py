"""Hostile archives are refused with an error code, and the store remains empty."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from coldstart.artifacts import oci
from coldstart.artifacts.archive import export_archive, import_archive
from coldstart.artifacts.errors import BundleError
from coldstart.artifacts.store import Store
from coldstart.artifacts.verify import check
from tools.bundles import member, plain_tar, publish

_LAYOUT = (member(oci.LAYOUT_FILE), oci.LAYOUT)
_INDEX = (member(oci.INDEX_FILE), oci.index_document([]))

HOSTILE = {
    "climbing name": (plain_tar(_LAYOUT, _INDEX, (member("../x"), b"x")), "CS-PATH"),
    "link for a blob": (
        plain_tar(_LAYOUT, _INDEX, (member("blobs/sha256/a", type=tarfile.SYMTYPE, linkname="/x"), b"")),
        "CS-LINK",
    ),
    "device": (plain_tar((member("oci-layout", type=tarfile.CHRTYPE), b"")), "CS-SPECIAL"),
    "layout twice": (plain_tar(_LAYOUT, _LAYOUT, _INDEX), "CS-DUPMEMBER"),
    "no layout": (plain_tar(_INDEX), "CS-LAYOUT"),
    "no index": (plain_tar(_LAYOUT), "CS-LAYOUT"),
    "compressed": (b"\x1f\x8b" + bytes(600), "CS-LAYOUT"),
    "empty": (b"", "CS-LAYOUT"),
    "cut short": (plain_tar(_LAYOUT, _INDEX)[:700], "CS-LAYOUT"),
    "other layout version": (
        plain_tar((member("oci-layout"), b'{"imageLayoutVersion":"9"}'), _INDEX),
        "CS-LAYOUT",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_import_refuses_hostile_archive(name: str, store: Store, tmp_path: Path) -> None:
    data, code = HOSTILE[name]
    (tmp_path / "hostile.tar").write_bytes(data)
    with pytest.raises(BundleError) as caught:
        import_archive(store, tmp_path / "hostile.tar")
    assert caught.value.code == code
    assert store.list() == []


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
            assert target.list() == []
        else:
            assert all(check(item) == [] for item in found)
