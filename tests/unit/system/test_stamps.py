"""Directory fingerprints find changes of bytes, owner and mode, also when times are set back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coldstart.system.trust import directory_fingerprint


@pytest.fixture
def place(tmp_path: Path) -> Path:
    made = tmp_path / "place"
    (made / "below").mkdir(parents=True, mode=0o700)
    (made / "one").write_bytes(b"1")
    (made / "below" / "two").write_bytes(b"2")
    return made


def test_unchanged_directory_matches(place: Path) -> None:
    stamped = directory_fingerprint.compute(place)
    assert {*stamped} == {".", "one", "below", "below/two"}
    assert directory_fingerprint.change(stamped, place, "made") is None
    (place / "one").read_bytes()
    (place / "three").write_bytes(b"3")  # a file added by this user
    assert directory_fingerprint.change(stamped, place, "made") is None


def test_bytes_that_changed_under_the_same_times(place: Path) -> None:
    stamped, before = directory_fingerprint.compute(place), (place / "below" / "two").stat()
    (place / "below" / "two").write_bytes(b"3")
    os.utime(place / "below" / "two", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (
        directory_fingerprint.change(stamped, place, "made")
        == f"{place}/below/two has changed since it was made"
    )


def test_missing_file_or_other_mode_is_a_change(place: Path) -> None:
    stamped = directory_fingerprint.compute(place)
    (place / "one").chmod(0o640)
    assert "one has changed" in str(directory_fingerprint.change(stamped, place, "made"))
    (place / "one").unlink()
    assert directory_fingerprint.change(stamped, place, "made") == f"{place}/one was removed"


def test_directory_writable_by_others_does_not_match(place: Path) -> None:
    stamped = directory_fingerprint.compute(place)
    (place / "three").write_bytes(b"3")
    (place / "three").chmod(0o666)
    assert "three is writable by other users" in str(directory_fingerprint.change(stamped, place, "made"))


def test_record_is_valid_for_one_directory(place: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(place.parent)
    assert directory_fingerprint.record("kind", place) == directory_fingerprint.record(
        "kind", tmp_path / "link" / "place"
    )
    assert directory_fingerprint.record("kind", place) != directory_fingerprint.record(
        "kind", tmp_path / "other" / "place"
    )
