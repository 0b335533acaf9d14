"""A command line with cache, state and configuration of its own, run in a child process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from coldstart.artifacts import sign
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.store import Store
from tools.bundles import publish
from tools.shell import Run

from coldstart.machine import paths
from coldstart.machine.paths import Cache


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in list(os.environ):
        if name.startswith(("COLDSTART_", "HF_", "XDG_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    return tmp_path


@pytest.fixture
def run(home: Path) -> Run:
    """Run ``coldstart ARGS`` and return its exit code, stdout and stderr."""

    def command(
        *args: str, code: int | None = 0, cwd: Path | None = None
    ) -> "subprocess.CompletedProcess[str]":
        program = [sys.executable, "-m", "coldstart.commands.cli", *args]
        done = subprocess.run(
            program, capture_output=True, text=True, cwd=cwd or home, check=False, timeout=60
        )
        assert code is None or done.returncode == code, done.stderr
        return done

    return command


@pytest.fixture
def bundle(home: Path) -> Bundle:
    """A signed bundle called org/tiny in the default store."""
    made = publish(Store(Cache.at().bundles), home / "scratch")
    sign.host_key(paths.state_dir())
    return made
