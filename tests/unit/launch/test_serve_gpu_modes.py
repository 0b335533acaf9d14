"""GPU engines: the CPU worker's replacements in torch.cuda are not imported, and engines are neither forked nor snapshotted."""

from __future__ import annotations

import subprocess
import sys

import pytest

from coldstart.contract.plan import LaunchPlan
from coldstart.errors import CommandFailedError, UsageError
from coldstart.launch import preparation
from coldstart.materialize import materialize
from coldstart.materialize.options import Options
from coldstart.system import runtime
from coldstart.vllm.engine import template

IMPORTS = """
import sys, torch
from vllm.platforms import current_platform
type(current_platform).is_cpu = lambda self: False
names = ("Stream", "Event", "current_stream", "synchronize")
before = [getattr(torch.cuda, name) for name in names]
from coldstart.vllm.engine import server
server.import_engine()
print([m for m in sys.modules if "cpu_worker" in m or m.endswith("cpu.shm")],
      [n for n, was in zip(names, before) if getattr(torch.cuda, n) is not was])
"""


@pytest.mark.vllm
def test_cpu_worker_is_not_imported() -> None:
    """vLLM's cpu/shm.py replaces torch.cuda's streams and events, which a GPU engine would then use."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False)
    assert done.stdout.strip().splitlines()[-1:] == ["[] []"], done.stdout[-500:] + done.stderr[-2000:]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "targets_cpu", lambda: False)


@pytest.mark.usefixtures("gpu")
def test_a_built_engine_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="CUDA does not survive a fork") as caught:
        preparation.start_template("engine", LaunchPlan([]), "m", 1.0)
    assert "--level runtime" in str(caught.value.hint)
    with pytest.raises(RuntimeError, match="CUDA does not survive a fork"):
        template.build(LaunchPlan([]), "engine")


@pytest.mark.usefixtures("gpu")
def test_a_snapshot_by_fork_is_refused_before_any_work() -> None:
    with pytest.raises(CommandFailedError, match="no CUDA state") as caught:
        materialize.materialize(None, Options(snapshot=True), pytest.fail)  # type: ignore[arg-type]
    assert "vllm snapshot create" in str(caught.value.hint)
