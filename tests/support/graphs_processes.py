"""Simulated engine processes, started as materialize starts real ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coldstart.contract.arguments import Arguments
from coldstart.contract.graphs import EngineTask
from coldstart.contract.plan import LaunchPlan

ROOT = Path(__file__).parents[2]
# A layout of which no bundle of these tests was made.
ELSEWHERE = 1000
KEYS = ["decode:1", "decode:8", "decode:64", "decode:256"]


def engine(task: EngineTask, seed: int = ELSEWHERE, **extra: str) -> dict[str, Any]:
    """One simulated engine process to its end; another seed is another address space, `extra` are further variables."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, "-m", "support.graphs_engine"]
    # The same sums in the same order in every process, whatever the test process has set for its own threads.
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    asked = LaunchPlan(Arguments(), engine=task).variables()
    made = os.environ | threads | {"PYTHONPATH": path, "SIM_SEED": str(seed)} | asked | extra
    done = subprocess.run(command, env=made, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1])) if done.stdout.strip() else {}


class Launches:
    """Starts engines and remembers their names and answers; `between` may meddle before each.

    The nth has the seed `first` + n, the same in every run of the tests: how many layouts are recorded hangs on whether
    regions touch by chance.
    """

    def __init__(
        self, between: Callable[[str], None] = lambda name: None, first: int = 0, **extra: str
    ) -> None:
        self.names: list[str] = []
        self.answers: list[dict[str, Any]] = []
        self._between, self._first, self._extra = between, first, extra

    def __call__(self, name: str, task: EngineTask) -> None:
        self._between(name)
        self.names.append(name)
        self.answers.append(engine(task, self._first + len(self.names), **self._extra))
