"""Directories follow XDG and the two overrides, and a socket directory is never shared."""

import os
import pwd
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock
from uuid import uuid4

import pytest
from coldstart.artifacts import files
from tools.command_line import main

from coldstart.errors import UsageError
from coldstart.host.live.servers import create_host_directory
from coldstart.system import paths
from coldstart.system.paths import Cache
from coldstart.system.proc import scratch


def test_override_wins_over_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLDSTART_CACHE_DIR", str(tmp_path / "env"))
    assert Cache.at().root == tmp_path / "env"
    assert Cache.at(tmp_path / "flag").bundles == tmp_path / "flag" / "bundles"


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a short private directory, without a runtime directory and a temporary directory of the user."""
    for name in ("XDG_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)
    with tempfile.TemporaryDirectory(prefix="cs-", dir="/tmp") as name:
        monkeypatch.setenv("XDG_STATE_HOME", f"{name}/state")
        monkeypatch.chdir(name)
        yield Path(name)


def _use(monkeypatch: pytest.MonkeyPatch, variable: str, value: Path | str) -> None:
    monkeypatch.setenv(variable, str(value))
    monkeypatch.setattr(tempfile, "tempdir", None)


def _make(place: Path, length: int) -> Path:
    """Create a directory whose path has `length` bytes, with a space and a letter of two bytes in it."""
    start = len(os.fsencode(place / "a é"))
    directory = place / ("a é" + "x" * (length - start))
    while len(directory.name) > 200:
        directory = directory.with_name(directory.name[:200]) / directory.name[201:]
    directory.mkdir(parents=True, mode=0o700)
    assert len(os.fsencode(directory)) == length
    return directory


def _bind(path: Path) -> None:
    """Bind a socket at `path` as another program does, which knows no other name of it."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    path.unlink()


@pytest.mark.parametrize("length", [41, 42, 43, 70, 71, 107, 108, 200, 300])
@pytest.mark.parametrize("variable", ["TMPDIR", "XDG_RUNTIME_DIR"])
def test_servers_have_room_for_vllms_sockets(
    place: Path, monkeypatch: pytest.MonkeyPatch, variable: str, length: int
) -> None:
    _use(monkeypatch, variable, _make(place, length))
    monkeypatch.delenv(scratch.SOCKETS_VARIABLE, raising=False)
    with scratch.use_scratch_directory() as own:
        _bind(Path(os.environ[scratch.SOCKETS_VARIABLE]) / str(uuid4()))
        assert Path(tempfile.gettempdir()) == own and own.stat().st_mode & 0o777 == 0o700
    assert not own.exists()
    with create_host_directory() as directory:
        _bind(directory / "99999.sock")
    assert not directory.exists()


def test_a_directory_that_its_owner_removes_is_passed_over(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed, lock = _make(place, 42), files.try_lock
    monkeypatch.setattr(
        files, "try_lock", lambda path: (path.parent == removed and removed.rmdir()) or lock(path)
    )
    with files.create_owned_directory(place) as own:
        assert own.exists() and not removed.exists()


def _give_away(place: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("giving a directory to another user needs root")
    os.chown(place, 64321, 64321)


def _replace_by_file(place: Path) -> None:
    place.rmdir()
    place.write_text("")


@pytest.mark.parametrize("spoil", [lambda place: place.chmod(0o777), _give_away, _replace_by_file])
@pytest.mark.parametrize("variable", ["TMPDIR", "XDG_RUNTIME_DIR"])
def test_an_unsafe_place_is_replaced_and_stays_as_it_is(
    place: Path, monkeypatch: pytest.MonkeyPatch, variable: str, spoil: Callable[[Path], None]
) -> None:
    bad = place / "bad"
    bad.mkdir()
    spoil(bad)
    _use(monkeypatch, variable, bad)
    for own in (paths.runtime_dir(), paths.temporary_dir()):
        assert not own.is_relative_to(bad) and own.stat().st_mode & 0o777 == 0o700
        assert own.stat().st_uid == os.getuid()
    assert not bad.is_dir() or list(bad.iterdir()) == []
    said = paths.describe_other_runtime_dir()
    if variable == "TMPDIR":
        assert said is None
    else:
        assert said is not None and str(bad) in said and str(paths.runtime_dir()) in said


@pytest.mark.parametrize("value", ["missing", "relative", "/proc/nothing/x"])
@pytest.mark.parametrize("variable", ["TMPDIR", "XDG_RUNTIME_DIR"])
def test_a_place_that_cannot_be_used_is_replaced(
    place: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    _use(monkeypatch, variable, place / value if value == "missing" else value)
    assert paths.runtime_dir().stat().st_mode & 0o777 == 0o700
    assert not Path("relative").exists()


def test_without_private_place_every_reason_is_reported(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _use(monkeypatch, "XDG_RUNTIME_DIR", place)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UsageError, match="/dev/shm is not writable") as caught:
        paths.runtime_dir()
    assert f"{place} is not writable" in str(caught.value)
    assert "set XDG_RUNTIME_DIR" in str(caught.value.hint)
    assert paths.describe_other_runtime_dir() is None


@pytest.fixture
def homeless(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Be a user without a home directory, as with a random user id in a container."""
    monkeypatch.setattr(pwd, "getpwuid", Mock(side_effect=KeyError))
    for name in ("HOME", "COLDSTART_CACHE_DIR", "XDG_CACHE_HOME", "XDG_STATE_HOME", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    return place


def test_without_a_home_the_error_names_the_variables(homeless: Path) -> None:
    for find in (Cache.at, paths.state_dir):
        with pytest.raises(UsageError, match="has no home directory") as caught:
            find()
        assert all(
            name in str(caught.value.hint) for name in ("HOME", "COLDSTART_CACHE_DIR", "XDG_STATE_HOME")
        )


def test_a_home_that_cannot_be_written_is_named(
    homeless: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", "/proc")  # where not even root creates a directory
    for words in (["inspect", "tiny-llama"], ["trust", "list"]):
        main(*words)
        assert "XDG_STATE_HOME" in capsys.readouterr().err
