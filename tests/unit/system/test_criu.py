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


@pytest.mark.parametrize(
    ("held", "hard", "reason"),
    [
        (ALL, 20000, None),
        (NO_RESOURCE, 1048576, None),
        (
            NO_RESOURCE,
            20000,
            "fs.nr_open (1048576), past the hard limit here (20000): it needs CAP_SYS_RESOURCE",
        ),
        (0, 1048576, "CAP_SYS_ADMIN and CAP_CHECKPOINT_RESTORE"),
    ],
)
def test_missing_names_the_requirement(
    monkeypatch: pytest.MonkeyPatch, held: int, hard: int, reason: str | None
) -> None:
    monkeypatch.setattr(criu, "_status", lambda field: f"{held:016x}")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, hard))
    found = criu.missing()
    assert found is None if reason is None else reason in str(found)
