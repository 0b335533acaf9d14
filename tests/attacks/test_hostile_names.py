"""Names of tree members made to cost time or to collide: refused by name, within seconds of processor time.

The blob of a stream is small, since names that resemble each other compress well.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from pathlib import Path
from time import process_time

import pytest
import zstandard
from coldstart.artifacts import trees
from coldstart.artifacts.bundle import accept_any
from coldstart.artifacts.errors import (
    BundleError,
    DuplicateMemberError,
    UnsafePathError,
)
from coldstart.artifacts.limits import LIMITS
from coldstart.artifacts.store import Store
from tools.bundles import forge, key, member, plain_tar, tar_zst, write_tree

from coldstart.validate.checks import check

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
        yield trees.build_tar_header("/".join(parts[:depth]), is_directory=True).tobuf(
            tarfile.PAX_FORMAT, "utf-8", "strict"
        )
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
    return b"".join(
        [*map(compressor.compress, headers), compressor.compress(trees.TAR_END), compressor.flush()]
    )


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
    with store.open_draft(key()) as draft, pytest.raises(UnsafePathError, match="64 components"):
        draft.add_tree("compile", tree)
