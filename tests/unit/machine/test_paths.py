"""Directories follow XDG and the two overrides, and a socket directory is never shared."""

from pathlib import Path

import pytest

from coldstart.errors import Usage
from coldstart.machine import paths


def test_override_wins_over_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLDSTART_CACHE_DIR", str(tmp_path / "env"))
    assert paths.cache_dir() == tmp_path / "env"
    assert paths.store_dir(tmp_path / "flag") == tmp_path / "flag" / "bundles"


def test_relative_xdg_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("COLDSTART_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert paths.cache_dir() == tmp_path / ".cache" / "coldstart"


def test_state_does_not_move_with_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("COLDSTART_CACHE_DIR", str(tmp_path / "cache"))
    assert paths.state_dir() == tmp_path / "state" / "coldstart"


def test_runtime_dir_is_private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert paths.runtime_dir().stat().st_mode & 0o777 == 0o700


def test_open_runtime_dir_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    paths.runtime_dir().chmod(0o777)
    with pytest.raises(Usage, match="0777"):
        paths.runtime_dir()
