"""Keys in files that a user names: bounded, and never from a pipe or a device that nobody chose."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coldstart.errors import UsageError
from coldstart.system.key_file import read_key


def test_read_key_follows_a_link_and_strips_white_space(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b" secret\n")
    (tmp_path / "link").symlink_to("f")
    assert read_key(tmp_path / "link") == "secret"
    (tmp_path / "f").write_bytes(b"x" * (1 << 20))
    with pytest.raises(UsageError, match="larger than 16384 bytes"):
        read_key(tmp_path / "f")


def test_read_key_refuses_at_once_when_the_file_is_special(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for special in (tmp_path / "pipe", tmp_path, Path("/dev/zero"), Path("/dev/null")):
        with pytest.raises(UsageError, match="not a regular file"):
            read_key(special)


def test_read_key_names_the_command_that_makes_a_key_when_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file") as caught:
        read_key(tmp_path / "none")
    assert "openssl rand" in str(caught.value.hint)


def test_read_key_reads_a_pipe_that_the_shell_opened() -> None:
    reader, writer = os.pipe()
    try:
        os.write(writer, b"secret\n")
        os.close(writer)
        assert read_key(Path(f"/dev/fd/{reader}")) == "secret"
    finally:
        os.close(reader)
