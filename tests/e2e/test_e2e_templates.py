"""Servers forked from a warm template have separate ports, lifetimes and correct tokens."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.graphs.library import fake_cuda
from tools.machine import PROJECT, VLLM, Machine, Tokens

from coldstart.contract.environment import TIMELINE_EVENTS
from coldstart.system.devices import parker
from coldstart.system.timeline import Timeline

pytestmark = pytest.mark.vllm


def test_two_servers_of_the_template(machine: Machine, engine_template: None, reference: Tokens) -> None:
    # auto takes the template, too.
    with (
        machine.serving("tiny-llama", "--mode", "template-engine") as one,
        machine.serving("tiny-llama", "--mode", "auto") as two,
    ):
        assert [one.report["mode"], two.report["mode"]] == ["template-engine"] * 2
        assert one.report["fallbacks"] == two.report["fallbacks"] == []
        assert one.report["pid"] != two.report["pid"] and one.report["url"] != two.report["url"]
        assert one.tokens() == two.tokens() == reference
        shown = json.loads(machine.run("template", "status", "--format", "json"))
        assert [len(template["servers"]) for template in shown["templates"]] == [2]
        machine.run("template", "stop", code=1)
        assert "cannot stop the template" in machine.error()
        assert two.tokens() == reference


@pytest.mark.nightly
def test_bench_wakes_the_same_engine_in_each_round(machine: Machine) -> None:
    """On the CPU: memory files take the place of the device's memory, and a double that of its driver."""
    driver = machine.root / "driver"
    driver.mkdir(parents=True)
    (driver / parker.LIBRARY).symlink_to(fake_cuda()._name)
    places = {"LD_LIBRARY_PATH": str(driver), "CUDA_FAKE_CHECKPOINTS": str(driver)}
    places["PYTHONPATH"] = str(PROJECT / "tests/support/rehearsal")
    user = Machine(machine.root / "asleep", places)
    vllm = ("--", *VLLM, "--enable-sleep-mode")
    user.run("materialize", "tiny-llama", *vllm)
    modes = ("--modes", "fresh,standby,parked")
    options = (*modes, "--runs", "2", "--warmup", "0", "--no-steady", "--format", "json")
    found = json.loads(user.run("bench", "tiny-llama", *options, *vllm))["modes"]
    for mode, step in (("standby", "wake the engine"), ("parked", "restore the device")):
        phases = found[mode]["phases"]
        assert phases[step]["n"] == found[mode]["first_token_s"]["n"] == 2 and "load the model" not in phases
        # The engine is older than the start that wakes it, and its memory counts all the same.
        assert found[mode]["pss_bytes"]["median"] > found["fresh"]["pss_bytes"]["median"] / 2


COLLECTIONS = """
import gc, os, time

def note(phase, info):
    if phase == "start" and info["generation"] == 2:
        with open({!r}, "a") as file:
            print(os.getpid(), time.monotonic(), file=file)

gc.callbacks.append(note)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["fresh", "template-runtime", "template-engine"])
def test_no_process_of_a_start_collects_all_garbage_until_it_is_warm(
    machine: Machine, bundle: Any, no_template: None, tmp_path: Path, mode: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(COLLECTIONS.format(str(tmp_path / "collections")))
    events = tmp_path / "events"
    watched = replace(machine, extra={"PYTHONPATH": str(tmp_path), TIMELINE_EVENTS: str(events)})
    if mode != "fresh":
        level = mode.removeprefix("template-")
        watched.run("template", "start", "tiny-llama", "--level", level, "--", *VLLM)
    with watched.serving("tiny-llama", "--mode", mode) as served:
        assert served.report["mode"] == mode
        server = served.report["pid"]
        (engine,) = psutil.Process(server).children()
        spans = {(span.pid, span.name): span for span in Timeline.read(events).spans}
    frozen_s = spans[server, "start engine"].start_s
    warm = {server: spans[server, "first token"].end_s}
    warm[engine.pid] = spans[engine.pid, "compile or warm up"].end_s
    lines = (line.split() for line in (tmp_path / "collections").read_text().splitlines())
    found = [(int(pid), float(time)) for pid, time in lines if int(pid) in warm]
    assert [(pid, time) for pid, time in found if frozen_s < time < warm[pid]] == []
    assert engine.pid in dict(found), "the engine collects once when it is warm"
    watched.run("template", "stop", "--force")
