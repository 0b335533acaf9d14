"""The last start of each key and mode is remembered; a damaged or read-only history prevents nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from coldstart.artifacts import files

from coldstart.launch import start_history
from coldstart.system.paths import Cache


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path)


def test_last_start_of_each_mode_is_found(cache: Cache) -> None:
    assert start_history.find_last("k", "fresh", cache) is None
    start_history.record_start("k", "fresh", 70.0, cache)
    start_history.record_start("k", "fresh", 65.25, cache)
    start_history.record_start("k", "snapshot", 1.5, cache)
    assert start_history.find_last("k", "fresh", cache) == 65.25
    assert start_history.find_last("k", "snapshot", cache) == 1.5
    assert start_history.find_last("other", "fresh", cache) is None


def test_history_drops_the_key_that_was_not_started_for_longest(cache: Cache) -> None:
    for number in range(100):
        start_history.record_start("first", "fresh", 1.0, cache)
        start_history.record_start(f"k{number}", "fresh", 1.0, cache)
    assert start_history.find_last("first", "fresh", cache) == 1.0
    assert start_history.find_last("k0", "fresh", cache) is None
    assert len(json.loads((cache.root / "starts.json").read_text())) == 64


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"k": 3}',
        '{"k": {"fresh": "x"}}',
        '{"k": {"fresh": -1}}',
        '{"k": {"fresh": NaN}}',
        "[" * 9999,
    ],
)
def test_damaged_history_has_no_figures_and_is_replaced(cache: Cache, text: str) -> None:
    (cache.root / "starts.json").write_text(text)
    assert start_history.find_last("k", "fresh", cache) is None
    start_history.record_start("k", "fresh", 2.0, cache)
    assert start_history.find_last("k", "fresh", cache) == 2.0


def test_full_disk_ends_no_start(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_atomic", full)
    start_history.record_start("k", "fresh", 2.0, cache)
    assert start_history.find_last("k", "fresh", cache) is None
