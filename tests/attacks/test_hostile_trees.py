"""Trees that attempt to escape, exhaust or confuse the extractor are refused with a code and leave no file."""

from __future__ import annotations

import tarfile
from io import BytesIO
from pathlib import Path

import pytest
import zstandard
from coldstart.artifacts import trees
from coldstart.artifacts.bundle import accept_any
from coldstart.artifacts.errors import ArchiveBombError, BundleError
from coldstart.artifacts.store import Store
from tools.bundles import forge, member, plain_tar, tar_zst

from coldstart.validate.checks import check


def _file(name: str, data: bytes = b"x") -> bytes:
    return tar_zst((member(name), data))


def _kind(kind: bytes, **changes: object) -> bytes:
    return tar_zst((member("x", type=kind, **changes), b""))


def _pax(**records: str) -> bytes:
    return tar_zst((member("x", pax_headers=records), b"x"))


HOSTILE = {
    "parent": (_file("../x"), "CS-PATH"),
    "parent inside": (_file("a/../../x"), "CS-PATH"),
    "absolute": (_file("/etc/x"), "CS-PATH"),
    "dot": (_file("./x"), "CS-PATH"),
    "empty part": (_file("a//x"), "CS-PATH"),
    "newline": (_file("a\nb"), "CS-PATH"),
    "long component": (_file("a" * 300), "CS-PATH"),
    "below a file": (tar_zst((member("a"), b"x"), (member("a/b"), b"y")), "CS-PATH"),
    "in no directory": (_file("a/b"), "CS-PATH"),
    "pax path": (_pax(path="../../x"), "CS-PATH"),
    "symlink": (_kind(tarfile.SYMTYPE, linkname="/etc/passwd"), "CS-LINK"),
    "symlink then through it": (
        tar_zst((member("d", type=tarfile.SYMTYPE, linkname="/tmp"), b""), (member("d/x"), b"x")),
        "CS-LINK",
    ),
    "hard link": (_kind(tarfile.LNKTYPE, linkname="/etc/passwd"), "CS-LINK"),
    "character device": (_kind(tarfile.CHRTYPE, devmajor=1, devminor=3), "CS-SPECIAL"),
    "block device": (_kind(tarfile.BLKTYPE), "CS-SPECIAL"),
    "fifo": (_kind(tarfile.FIFOTYPE), "CS-SPECIAL"),
    "gnu long name without its member": (_kind(tarfile.GNUTYPE_LONGNAME), "CS-TREE"),
    "pax sparse": (_pax(**{"GNU.sparse.major": "1", "GNU.sparse.realsize": "9"}), "CS-SPECIAL"),
    "same name twice": (tar_zst((member("a"), b"x"), (member("a"), b"y")), "CS-DUPMEMBER"),
    "ratio": (_file("zeros", bytes(48 << 20)), "CS-BOMB"),
    "pax header": (_pax(comment="x" * 20_000), "CS-BOMB"),
    "negative size in pax": (_pax(size="-1"), "CS-TREE"),
    "size past the end": (_pax(size="999999"), "CS-TREE"),
    "cut short": (zstandard.compress(bytes(100)), "CS-TREE"),
    "cut short after a member": (zstandard.compress(plain_tar((member("a"), b"x"))[:1024]), "CS-TREE"),
    "damaged second header": (
        zstandard.compress(plain_tar((member("a"), b"x"), (member("b"), b"x")).replace(b"b\0", b"c\0", 1)),
        "CS-TREE",
    ),
    "no zstd": (b"not a zstd frame at all", "CS-TREE"),
    "not a tar": (zstandard.compress(b"x" * 1024), "CS-TREE"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_extract_refuses_hostile_tree(name: str, store: Store, tmp_path: Path) -> None:
    blob, code = HOSTILE[name]
    bundle = forge(store, blob)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(BundleError) as caught:
        bundle.extract_section("compile", tmp_path / "out", trust=accept_any)
    assert caught.value.code == code
    assert caught.value.hint
    assert sorted(tmp_path.rglob("*")) == before
    assert [finding.code for finding in check(bundle)] == [code]


def test_extract_refuses_too_large_window(store: Store, tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=30, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    bundle = forge(store, compressor.compress(bytes(4096)) + compressor.flush())
    with pytest.raises(BundleError) as caught:
        bundle.extract_section("compile", tmp_path / "out", trust=accept_any)
    assert caught.value.code == "CS-TREE"


def test_read_tar_refuses_more_bytes_than_its_budget() -> None:
    data = plain_tar(*((member(f"f{n}"), b"") for n in range(11)))
    assert len(trees.read_tar(BytesIO(data), len(data))) == 11
    with pytest.raises(ArchiveBombError):
        trees.read_tar(BytesIO(data), 10 * 512)
