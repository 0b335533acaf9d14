"""GPU memory by process, read with nvidia-ml-py from a fake NVML library whose answers follow NVML's manual."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.fake_nvml import GIB, Fake

from coldstart.host.live.profiles import Meter
from coldstart.system.devices import nvml

OWN, ANY = os.getpid(), 1
# No process has the highest PID of Linux (PID_MAX_LIMIT), which is never given out.
FOREIGN = 1 << 22


@contextmanager
def running_child() -> Iterator[int]:
    """Run a child of a child of this process; yield its PID."""
    inner = "import sys; sys.stdin.read()"
    code = f"import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', {inner!r}]); print(c.pid); c.wait()"
    with subprocess.Popen(
        [sys.executable, "-uc", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        yield int(child.stdout.readline())


def test_memory_of_a_tree_is_summed_over_its_processes_and_devices(fake: Fake) -> None:
    fake.add()
    fake.add()
    with running_child() as grandchild:
        fake.run(0, OWN, GIB)
        fake.run(0, ANY, 8 * GIB)
        fake.run(0, grandchild, 2 * GIB)
        fake.run(1, grandchild, 4 * GIB)
        assert nvml.process_memory() == {OWN: GIB, ANY: 8 * GIB, grandchild: 6 * GIB}
        assert Meter().gpu_memory(OWN) == 7 * GIB
        assert Meter().gpu_memory(grandchild) == 6 * GIB


def test_instances_of_a_divided_device_are_asked(fake: Fake) -> None:
    fake.add(mig=1)
    for _ in range(2):
        fake.add(parent=0)
    fake.run(1, OWN, GIB)
    fake.run(2, OWN, 2 * GIB)
    assert Meter().gpu_memory(OWN) == 3 * GIB


def test_processes_of_another_pid_namespace_are_no_figure(fake: Fake) -> None:
    fake.add()
    fake.run(0, OWN, GIB)
    fake.run(0, FOREIGN, GIB)
    assert nvml.process_memory() == {} and Meter().gpu_memory(OWN) is None


@pytest.mark.parametrize("code", [2, 3, 4, 13, 15, 999])
@pytest.mark.parametrize("name", ["nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetHandleByIndex_v2"])
def test_device_that_does_not_answer_is_no_figure(fake: Fake, name: str, code: int) -> None:
    fake.add()
    fake.add()
    fake.run(0, OWN, GIB)
    fake.fail(name, code, device=1)
    assert Meter().gpu_memory(OWN) is None


@pytest.mark.parametrize("code", [9, 12, 999])
def test_library_without_a_driver_is_no_figure(fake: Fake, code: int) -> None:
    fake.add()
    fake.run(0, OWN, GIB)
    fake.fail("nvmlInitWithFlags", code)
    assert Meter().gpu_memory(OWN) is None


def test_ended_process_is_reported(fake: Fake) -> None:
    fake.add()
    fake.run(0, OWN, GIB)
    with pytest.raises(ProcessLookupError):
        Meter().gpu_memory(FOREIGN)
