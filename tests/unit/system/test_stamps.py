"""Whether a directory still is what it was: changes of bytes, owner and mode, whatever times are set back."""

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


def test_what_was_left_alone_has_not_changed(place: Path) -> None:
    stamped = directory_fingerprint.of(place)
    assert {*stamped} == {".", "one", "below", "below/two"}
    assert directory_fingerprint.change(stamped, place, "made") is None
    (place / "one").read_bytes()
    (place / "three").write_bytes(b"3")  # this user's own addition
    assert directory_fingerprint.change(stamped, place, "made") is None


def test_bytes_that_changed_under_the_same_times(place: Path) -> None:
    stamped, before = directory_fingerprint.of(place), (place / "below" / "two").stat()
    (place / "below" / "two").write_bytes(b"3")
    os.utime(place / "below" / "two", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (
        directory_fingerprint.change(stamped, place, "made")
        == f"{place}/below/two has changed since it was made"
    )


def test_what_is_gone_or_of_another_mode(place: Path) -> None:
    stamped = directory_fingerprint.of(place)
    (place / "one").chmod(0o640)
    assert "one has changed" in str(directory_fingerprint.change(stamped, place, "made"))
    (place / "one").unlink()
    assert directory_fingerprint.change(stamped, place, "made") == f"{place}/one is gone"


def test_what_others_could_write_to(place: Path) -> None:
    stamped = directory_fingerprint.of(place)
    (place / "three").write_bytes(b"3")
    (place / "three").chmod(0o666)
    assert "three may be written by others" in str(directory_fingerprint.change(stamped, place, "made"))


def test_a_record_is_of_one_place(place: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(place.parent)
    assert directory_fingerprint.record("kind", place) == directory_fingerprint.record(
        "kind", tmp_path / "link" / "place"
    )
    assert directory_fingerprint.record("kind", place) != directory_fingerprint.record(
        "kind", tmp_path / "other" / "place"
    )
