"""Changes of files, and the cache of what was read from them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coldstart.system import file_state
from coldstart.system.file_state import cache_by_state, read_state


class Reader:
    """Function that returns a file's text and counts its calls."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, path: Path) -> str:
        self.count += 1
        return path.read_text()


def test_read_state_differs_when_a_file_is_replaced_with_equal_size_and_time(tmp_path: Path) -> None:
    path, other = tmp_path / "a", tmp_path / "b"
    path.write_text("1")
    before = read_state(path)
    other.write_text("2")
    os.utime(other, ns=(before.modified_ns, before.modified_ns))
    other.replace(path)
    assert read_state(path) != before


def test_cache_reads_once_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_state, "RACY_S", -1.0)
    path, reader = tmp_path / "a", Reader()
    cached = cache_by_state(reader)
    path.write_text("one")
    assert [cached(path), cached(path)] == ["one", "one"] and reader.count == 1
    path.write_text("other")
    assert cached(path) == "other" and reader.count == 2


def test_cache_reads_again_when_the_file_is_young(tmp_path: Path) -> None:
    path, reader = tmp_path / "a", Reader()
    cached = cache_by_state(reader)
    path.write_text("one")
    assert [cached(path), cached(path)] == ["one", "one"] and reader.count == 2


def test_cache_raises_when_the_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        cache_by_state(Reader())(tmp_path / "none")
