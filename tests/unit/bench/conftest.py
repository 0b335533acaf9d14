"""Launchers of a fake server process."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from coldstart.bench import run_order
from coldstart.bench.measure import RunSettings
from coldstart.validate.launch import Command, ModeUnavailableError, RunFiles

SERVER = Path(__file__).parents[2] / "support" / "fake_server.py"


@dataclass
class FakeLauncher:
    mode: str
    behaviour: str = "serves"
    closed: int = 0

    @property
    def tells_readiness(self) -> bool:
        return self.mode not in run_order.BASELINES

    def prepare(self) -> None:
        if self.behaviour == "unavailable":
            raise ModeUnavailableError("no CRIU here")

    def command(self, files: RunFiles) -> Command:
        argv = [sys.executable, "-I", "-S", str(SERVER), str(files.port), str(files.ready)]
        return Command([*argv, self.behaviour, self.mode], {"FAKE": "1"})

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def fake() -> Callable[..., FakeLauncher]:
    return FakeLauncher


@pytest.fixture
def settings() -> RunSettings:
    return RunSettings(prompts=("a", "b c"), max_tokens=4, ready_timeout_s=20.0, steady=False)
