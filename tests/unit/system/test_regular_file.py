"""Reading a file that a user names: bounded, and never from a pipe or a device."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coldstart.errors import UsageError
from coldstart.system.regular_file import read_regular


def test_read_regular_returns_the_bytes_up_to_the_cap(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("f")
    assert read_regular(tmp_path / "link", 5) == b"12345"
    with pytest.raises(UsageError, match="larger than 4 bytes"):
        read_regular(tmp_path / "f", 4)


def test_read_regular_refuses_at_once_when_the_file_is_special(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for special in (tmp_path / "pipe", Path("/dev/zero"), Path("/dev/null")):
        with pytest.raises(UsageError, match="not a regular file"):
            read_regular(special, 5)


def test_read_regular_names_the_reason_when_the_file_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_regular(tmp_path / "none", 5)
    with pytest.raises(UsageError, match="Is a directory"):
        read_regular(tmp_path, 5)
