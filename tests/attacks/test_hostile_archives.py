"""Hostile archives, trees and names of members are refused with a code, and leave no file."""

import tarfile
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from pathlib import Path
from time import process_time

import pytest
import zstandard
from coldstart.artifacts import oci, trees
from coldstart.artifacts.archive import export_archive, import_archive
from coldstart.artifacts.bundle import accept_any
from coldstart.artifacts.errors import (
    ArchiveBombError,
    BundleError,
    DuplicateMemberError,
    MissingBlobError,
    NotALayoutError,
    TooLargeError,
    UnsafePathError,
)
from coldstart.artifacts.limits import LIMITS
from coldstart.artifacts.store import Store
from tools.bundles import forge, key, member, plain_tar, publish, tar_zst, write_tree

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


def _file(name: str, data: bytes = b"x") -> bytes:
    return tar_zst((member(name), data))


def _kind(kind: bytes, **changes: object) -> bytes:
    return tar_zst((member("x", type=kind, **changes), b""))


def _pax(**records: str) -> bytes:
    return tar_zst((member("x", pax_headers=records), b"x"))


HOSTILE_TREES = {
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


@pytest.mark.parametrize("name", HOSTILE_TREES)
def test_extract_refuses_hostile_tree(name: str, store: Store, tmp_path: Path) -> None:
    blob, code = HOSTILE_TREES[name]
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
    with pytest.raises(BundleError, match="CS-TREE: "):
        bundle.extract_section("compile", tmp_path / "out", trust=accept_any)


def test_read_tar_refuses_more_bytes_than_its_budget() -> None:
    data = plain_tar(*((member(f"f{n}"), b"") for n in range(11)))
    assert len(trees.read_tar(BytesIO(data), len(data))) == 11
    with pytest.raises(ArchiveBombError):
        trees.read_tar(BytesIO(data), 10 * 512)


COUNT = 20_000
# Less than a second on an idle machine; a search that is quadratic in the names takes minutes.
LIMIT_S = 20.0


def _header(name: str) -> bytes:
    return trees.build_tar_header(name).tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")


def _numbered(count: int) -> Iterator[bytes]:
    """Yield headers of empty files named 0000000 and up; only the digits and the checksum differ."""
    first = _header("0000000")
    base = int(first[148:154], 8) - 7 * ord("0")
    for number in range(count):
        name = f"{number:07}".encode()
        yield name + first[7:148] + f"{base + sum(name):06o}\0 ".encode() + first[156:]


def _siblings() -> Iterator[bytes]:
    """Yield long names that share 63 directories."""
    parts = ["d" * 60] * (LIMITS.path_depth - 1)
    for depth in range(1, LIMITS.path_depth):
        header = trees.build_tar_header("/".join(parts[:depth]), is_directory=True)
        yield header.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")
    above = "/".join(parts)
    yield from (_header(f"{above}/{number}") for number in range(LIMITS.tree_members // 20))


def _large_headers() -> Iterator[bytes]:
    """Yield names whose pax headers hold as many records as 16 KiB can."""
    records = b"5 a=\n" * (LIMITS.pax_header_bytes // 5)
    pax = member("pax", type=b"x", size=len(records)).tobuf()
    padded = pax + records + b"\0" * (-len(records) % 512)
    return (padded + _header(str(number)) for number in range(LIMITS.tree_members // 100))


STREAMS: dict[str, tuple[Callable[[], Iterable[bytes]], str]] = {
    "2,000 components": (lambda: [_header("/".join(["a"] * 2000))] * COUNT, "CS-PATH"),
    "the first name again at the end": (lambda: [*_numbered(COUNT), _header("0000000")], "CS-DUPMEMBER"),
    "a file below a file at the end": (lambda: [*_numbered(COUNT), _header("0000000/x")], "CS-PATH"),
    "one too many": (lambda: _numbered(LIMITS.tree_members + 1), "CS-BOMB"),
    "siblings far down": (_siblings, "CS-BOMB"),
    "large pax headers": (_large_headers, "CS-BOMB"),
}

# Streams that take seconds; the others show the same limits.
LONG = ("large pax headers", "one too many")


def _compressed(headers: Iterable[bytes]) -> bytes:
    compressor = zstandard.ZstdCompressor(level=1).compressobj()
    parts = [*map(compressor.compress, headers), compressor.compress(trees.TAR_END), compressor.flush()]
    return b"".join(parts)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in STREAMS]
)
def test_hostile_names_are_refused_within_seconds(name: str, store: Store) -> None:
    headers, code = STREAMS[name]
    bundle = forge(store, _compressed(headers()))
    began = process_time()
    findings = check(bundle)
    assert [one.code for one in findings] == [code] and process_time() - began < LIMIT_S


@pytest.mark.parametrize(
    ("first", "second", "error"),
    [
        (("a/b", False), ("a", False), UnsafePathError),
        (("a", False), ("a/b", False), UnsafePathError),
        (("a", False), ("a/b/c", True), UnsafePathError),
        (("a", True), ("a/b/c", False), UnsafePathError),
        (("a", False), ("a", True), DuplicateMemberError),
        (("a", True), ("a", False), DuplicateMemberError),
    ],
)
def test_every_conflict_of_two_names_is_named(
    first: tuple[str, bool], second: tuple[str, bool], error: type[BundleError]
) -> None:
    named = [
        (member(name, type=b"5" if is_directory else b"0"), b"") for name, is_directory in (first, second)
    ]
    with pytest.raises(error):
        trees.read_tar(BytesIO(plain_tar(*named)), 1 << 20)


def test_depth_is_limited_for_readers_and_writers(store: Store, tmp_path: Path) -> None:
    above = ["/".join(["d"] * depth) for depth in range(1, LIMITS.path_depth)]
    deepest = f"{above[-1]}/d"
    members = [*((member(name, type=b"5"), b"") for name in above), (member(deepest), b"x")]
    bundle = forge(store, tar_zst(*members))
    assert bundle.extract_section("compile", tmp_path / "out", trust=accept_any) == LIMITS.path_depth
    tree = write_tree(tmp_path / "tree", {f"{deepest}/x": b"x"})
    with store.open_draft(key()) as draft, pytest.raises(UnsafePathError, match="64 parts"):
        draft.add_tree("compile", tree)
