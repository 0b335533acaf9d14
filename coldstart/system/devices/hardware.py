"""Hardware fingerprint of this machine, on which the validity of generated code depends.

It is read from /proc/cpuinfo and NVML, without torch or a driver context. It contains no path, host name or environment
variable. Machines with equal fingerprints can run each other's kernels.
"""

import os
import platform
import re
from pathlib import Path

from coldstart.errors import ColdstartError
from coldstart.system import runtime
from coldstart.system.devices import nvml
from coldstart.system.proc import processes

Scalar = str | int | float | bool | None

# Inductor compiles with -march=native, so every extension counts that a compiler may use. Flags of the kernel, of
# virtualization and of mitigations do not count: they differ between equal machines.
_ISA = re.compile(
    r"sse\w*|ssse3|pni|avx\w*|fma4?|f16c|bmi[12]|popcnt|abm|movbe|amx_\w+|gfni|vaes|vpclmulqdq|aes|pclmulqdq|sha_ni|adx"
    r"|asimd\w*|neon|sve\w*|sme|sme[2_]\w*|bf16|i8mm|fphp|atomics|crc32"
)
_ARM_VENDORS = {"0x41": "ARM", "0x61": "Apple", "0x4e": "NVIDIA", "0xc0": "Ampere", "0x51": "Qualcomm"}


def find_engine_memory_capacity() -> int | None:
    """Return the size in bytes of the memory that the engine can use (RAM, or the memory of all GPUs), or None if unknown."""
    if runtime.targets_cpu():
        return processes.read_total_memory()
    return sum(device.memory_bytes for device in nvml.list_gpus()) or None


def read_cpu_fields(cpuinfo: str | None = None) -> dict[str, Scalar]:
    """Return the fields cpu.machine, cpu.vendor, cpu.family, cpu.model, cpu.isa (sorted, space-separated) and cpu.threads."""
    text = Path("/proc/cpuinfo").read_text() if cpuinfo is None else cpuinfo
    first = _parse_first_block(text)
    flags = _split_flags(first)
    implementer = first.get("CPU implementer", "")
    return {
        "cpu.machine": platform.machine(),
        "cpu.vendor": first.get("vendor_id") or _ARM_VENDORS.get(implementer, implementer) or None,
        "cpu.family": first.get("cpu family") or first.get("CPU architecture"),
        "cpu.model": first.get("model") or first.get("CPU part"),
        "cpu.isa": " ".join(sorted(flag for flag in set(flags) if _ISA.fullmatch(flag))),
        "cpu.threads": len(os.sched_getaffinity(0)),
    }


def read_cpu_flags() -> str:
    """Return all flags of the processor, even those that only the kernel uses: a frozen process may have queried any flag."""
    with Path("/proc/cpuinfo").open() as file:  # only the first processor's block
        return " ".join(sorted(_split_flags(_parse_first_block(file.read(1 << 13)))))


def read_gpu_fields() -> dict[str, Scalar]:
    """Return the gpu.* fields of the first GPU, or no fields without a GPU. The number of GPUs is an engine argument.

    Raises:
        ColdstartError: A driver is installed, but the first GPU cannot be read. A key without its fields would fit every
            GPU.
    """
    state = nvml.read_gpu_state()
    if not state.devices and state.problems:
        raise ColdstartError(
            f"cannot read the GPU: {'; '.join(state.problems)}", hint="run `coldstart doctor`"
        )
    if not state.devices:
        return {}
    first = state.devices[0]
    return {
        "gpu.name": first.name,
        "gpu.multiprocessors": first.multiprocessors,
        "gpu.compute_capability": first.compute_capability,
        "gpu.memory_bytes": first.memory_bytes,
        # Generated code depends on the driver's release branch alone.
        "gpu.driver": first.driver.partition(".")[0],
    }


def _split_flags(block: dict[str, str]) -> list[str]:
    return (block.get("flags") or block.get("Features") or block.get("isa") or "").split()


def _parse_first_block(text: str) -> dict[str, str]:
    block = text.strip().split("\n\n", 1)[0]
    pairs = (line.partition(":") for line in block.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
