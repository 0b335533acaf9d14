"""A start without vLLM's integration points runs stock vLLM, and a warm engine has garbage collection enabled."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tools.machine import Machine, Tokens

pytestmark = [pytest.mark.vllm, pytest.mark.nightly]
# Every interpreter reports at SIGUSR2, which vLLM does not use, whether garbage collection is enabled.
PROBE = """
import gc, os, pathlib, signal
place = pathlib.Path(os.environ["GC_PROBE"])
signal.signal(signal.SIGUSR2, lambda *_: place.joinpath(str(os.getpid())).write_text(str(gc.isenabled())))
"""
# Every interpreter of the server lacks an integration point of its start.
LACKING = """
from coldstart.vllm import compat
check = compat.check
compat.check = lambda feature, load=None: "It is missing, simulated." if feature == "start" else check(feature, load)
"""


def test_serve_runs_stock_vllm_without_the_integration_point(
    machine: Machine, bundle: Any, reference: Tokens, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(LACKING)
    elsewhere = replace(machine, extra={"PYTHONPATH": str(tmp_path)})
    with elsewhere.serving("tiny-llama", "--mode", "fresh") as served:
        assert {"section": "start", "reason": "It is missing, simulated. vLLM's own server runs."} in [
            dict(fallback) for fallback in served.report["fallbacks"]
        ]
        assert served.tokens() == reference


def test_warm_engine_collects_garbage(machine: Machine, bundle: Any, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(PROBE)
    probed = replace(machine, extra={"PYTHONPATH": str(tmp_path / "site"), "GC_PROBE": str(tmp_path)})
    with probed.serving("tiny-llama", "--mode", "fresh") as served:
        server = served.report["pid"]
        pids = [one.pid for one in served.family() if one.pid == server or one.ppid() == server]
        assert len(pids) >= 2  # the server, and the engine that it forked
        for pid in pids:
            os.kill(pid, signal.SIGUSR2)
        deadline = time.monotonic() + 30
        while len(list(tmp_path.glob("[0-9]*"))) < len(pids) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert {path.name: path.read_text() for path in tmp_path.glob("[0-9]*")} == {
            str(pid): "True" for pid in pids
        }
