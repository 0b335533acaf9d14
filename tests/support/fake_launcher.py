"""Launcher of fake_server.py for tests of bench and validate."""

import sys
from dataclasses import dataclass
from pathlib import Path

from coldstart.bench import run_order
from coldstart.validate.launch import ModeUnavailableError, RunFiles

SERVER = Path(__file__).with_name("fake_server.py")


@dataclass
class FakeLauncher:
    """Launcher whose server has the given behaviour; `closed` counts calls of `close`."""

    mode: str
    behaviour: str = "serves"
    closed: int = 0

    @property
    def writes_ready_file(self) -> bool:
        return self.mode not in run_order.BASELINES

    def prepare(self) -> None:
        if self.behaviour == "unavailable":
            raise ModeUnavailableError("no CRIU here")

    def build_command(self, files: RunFiles) -> tuple[list[str], dict[str, str]]:
        argv = [sys.executable, "-I", "-S", str(SERVER), str(files.port), str(files.ready_file)]
        return [*argv, self.behaviour, self.mode], {"FAKE": "1"}

    def close(self) -> None:
        self.closed += 1
