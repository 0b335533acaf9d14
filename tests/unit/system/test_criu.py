"""Missing requirements of CRIU are reported before it runs."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from coldstart.system.snapshot import criu

ALL, NO_RESOURCE = (1 << 41) - 1, ((1 << 41) - 1) & ~(1 << 24)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "criu"
    program.touch(mode=0o700)
    monkeypatch.setenv(str(criu.VARIABLE), str(program))
    (tmp_path / "nr_open").write_text("1048576\n")
    monkeypatch.setattr(criu, "_NR_OPEN", tmp_path / "nr_open")


def _hold(monkeypatch: pytest.MonkeyPatch, held: int, hard: int) -> None:
    monkeypatch.setattr(criu, "_read_capabilities", lambda: held)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, hard))


@pytest.mark.parametrize(
    ("report", "is_accepted"),
    [
        ("Version: 3.17", False),
        ("Version: 4.1.1", False),
        ("Version: 4.2", True),
        ("Version: 4.10\nGitID: v4.10", True),
        ("Version: 5.0", True),
        ("nothing", True),
    ],
)
def test_missing_names_the_version_when_criu_is_too_old(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, report: str, is_accepted: bool
) -> None:
    _hold(monkeypatch, ALL, 1048576)
    (tmp_path / "criu").write_text(f"#!/bin/sh\necho '{report}'\n")
    if is_accepted:
        assert criu.explain_unavailable() is None and criu.suggest_fix() is None
        return
    assert f"CRIU {report.removeprefix('Version: ')}: 4.2 or newer is required" in str(
        criu.explain_unavailable()
    )
    assert "build CRIU 4.2 or newer" in str(criu.suggest_fix())
