"""Other architectures need no special handling, and a killed `materialize` leaves no files."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from coldstart.artifacts.store import Store
from tools.machine import READY_S, VLLM, Machine, remaining

from coldstart.validate import process_tree

pytestmark = pytest.mark.vllm
# Without compiled code, which takes most of the time.
EAGER = (*VLLM, "--enforce-eager")


def test_materialize_succeeds_after_a_killed_run(machine: Machine, bundle: Any) -> None:
    before = machine.run("list", "--format", "json")
    if "tiny-opt" not in before:
        family = _killed_in_the_middle(machine)
        assert len(family) >= 2 and remaining(family) == []
        assert machine.run("list", "--format", "json") == before
        machine.run("validate", bundle.ref)
    _answers_its_canary(machine, "tiny-opt", EAGER, {"mode": True})
    assert list((machine.cache / "work").rglob("*")) == []


@pytest.mark.nightly
def test_a_third_architecture(machine: Machine) -> None:
    _answers_its_canary(machine, "tiny-qwen2", VLLM, {"mode": True, "compile": True})


def _killed_in_the_middle(machine: Machine) -> list[process_tree.ProcessSample]:
    """Kill `materialize` after its engine has imported vLLM; return all its processes."""
    process = machine.start("materialize", "tiny-opt", "--", *EAGER, stderr=subprocess.DEVNULL)
    deadline_s = time.monotonic() + READY_S
    while "import vllm" not in "".join(events.read_text() for events in _events(machine)):
        assert process.poll() is None and time.monotonic() < deadline_s
        time.sleep(0.05)
    processes = process_tree.snapshot()
    family = [processes[pid] for pid in process_tree.tree(processes, [process.pid])]
    process.send_signal(signal.SIGKILL)
    process.wait()
    return family


def _events(machine: Machine) -> list[Path]:
    return list((machine.cache / "work").glob("*/offline.events"))


def _answers_its_canary(
    machine: Machine, model: str, args: tuple[str, ...], fast_path: dict[str, bool]
) -> None:
    said = json.loads(machine.run("materialize", model, "--format", "json", "--", *args))
    info: Any = Store(machine.cache / "bundles").get(said["ref"]).json("modelinfo")
    with machine.serving(model, "--mode", "fresh", vllm=args) as served:
        assert served.report["fast_path"] == fast_path
        missing = [] if "compile" in fast_path else ["compile"]
        assert [one["section"] for one in served.report["fallbacks"]] == missing
        assert served.report["canary"] is True
        answer = served.client.complete(info["canary"]["prompt"], len(info["canary"]["tokens"]))
        assert list(answer.tokens) == info["canary"]["tokens"]
