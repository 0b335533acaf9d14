"""Byte ranges of a section's chunks."""

from __future__ import annotations

import io

import pytest
from coldstart.artifacts import ranges
from coldstart.artifacts.errors import DigestMismatchError
from coldstart.artifacts.manifest import SectionEntry


def entry(size: int, chunks: tuple[str, ...] = ()) -> SectionEntry:
    return SectionEntry("weights", 1, "sha256:" + "0" * 64, size, "application/octet-stream", {}, chunks)


@pytest.mark.parametrize(
    ("size", "number", "expected"),
    [
        (ranges.CHUNK, 0, (0, ranges.CHUNK)),
        (ranges.CHUNK + 3, 0, (0, ranges.CHUNK)),
        (ranges.CHUNK + 3, 1, (ranges.CHUNK, 3)),
        (3 * ranges.CHUNK, 2, (2 * ranges.CHUNK, ranges.CHUNK)),
    ],
)
def test_the_last_chunk_ends_where_the_section_ends(
    size: int, number: int, expected: tuple[int, int]
) -> None:
    assert ranges.span(entry(size), number) == expected


def test_last_chunk_excludes_bytes_after_the_section() -> None:
    held = entry(5, ("a" * 64,))
    assert list(ranges.pieces(io.BytesIO(b"12345and more"), held)) == [(0, b"12345")]


def test_a_section_without_chunks_is_not_read_by_ranges() -> None:
    large = entry(ranges.CHUNK + 1)
    with pytest.raises(DigestMismatchError, match="lists no chunks"):
        ranges.read_range(io.BytesIO(b"12345"), large, 0, 1)
