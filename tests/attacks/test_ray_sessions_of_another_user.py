"""Another user of the machine cannot enter the directories in which Ray writes its logs and sockets."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from coldstart.fleet.live.ray_process import run_own_ray
from coldstart.system.paths import Cache

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("ray") is None, reason="no ray")]


def test_other_user_cannot_enter_the_sessions_of_a_fleet(
    home: Path, stranger: Callable[[Callable[[], object]], object]
) -> None:
    with run_own_ray(None, Cache.at(home / "cache")) as ray:
        directory = ray.node.log.parent
        sessions = [Path(found) for found, _, _ in os.walk(directory)]
        assert any(path.name == "logs" for path in sessions)
        # Ray opens some of them to everyone: without the directory above them, this test would fail.
        assert any(path.stat().st_mode & stat.S_IWOTH for path in sessions)
        assert directory.stat().st_mode & 0o777 == 0o700
        for path in sessions:
            assert stranger(lambda path=path: os.listdir(path)) is None  # type: ignore[misc]  # noqa: PTH208
            assert stranger(lambda path=path: (path / "planted").symlink_to("/etc/passwd")) is None  # type: ignore[misc]
            assert not (path / "planted").is_symlink()


def test_directories_above_the_sessions_of_a_joining_node_are_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray._common.utils import try_to_create_directory
    from ray.scripts import scripts

    from coldstart.fleet.live import ray_process

    sessions = tmp_path / "coldstart-ray-x" / "r"
    monkeypatch.setattr(ray_process, "die_with_supervisor", lambda: None)
    monkeypatch.setattr(scripts, "main", lambda: try_to_create_directory(str(sessions)))
    before = os.umask(0o022)
    try:
        ray_process.main()
    finally:
        os.umask(before)
    assert sessions.stat().st_mode & 0o777 == 0o777
    assert sessions.parent.stat().st_mode & 0o777 == 0o700
