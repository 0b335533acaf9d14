"""Directories follow XDG and the two overrides, and a socket directory is never shared."""

import stat
from pathlib import Path

import pytest

from coldstart.errors import UsageError
from coldstart.system import paths
from coldstart.system.paths import Cache


def test_override_wins_over_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLDSTART_CACHE_DIR", str(tmp_path / "env"))
    assert Cache.at().root == tmp_path / "env"
    assert Cache.at(tmp_path / "flag").bundles == tmp_path / "flag" / "bundles"


def test_relative_xdg_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("COLDSTART_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert Cache.at().root == tmp_path / ".cache" / "coldstart"


def test_state_does_not_move_with_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLDSTART_CACHE_DIR", str(tmp_path / "cache"))
    assert paths.state_dir() == tmp_path / "state" / "coldstart"


def test_runtime_dir_is_private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert paths.runtime_dir().stat().st_mode & 0o777 == 0o700


def test_writable_runtime_dir_is_replaced_by_a_private_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    taken = paths.runtime_dir()
    taken.chmod(0o777)
    own = paths.runtime_dir()
    assert own != taken and own == paths.runtime_dir()
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["coldstart", own.name, "state"])


def test_runtime_dir_reports_reason_and_hint_without_a_private_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "state").write_text("a file")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    paths.runtime_dir().chmod(0o777)
    with pytest.raises(UsageError, match="mode 0777") as caught:
        paths.runtime_dir()
    assert "set XDG_RUNTIME_DIR" in str(caught.value.hint)
