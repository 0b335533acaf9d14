"""The fingerprint of this machine: what decides which generated code is valid on it.

Read from /proc/cpuinfo and NVML; neither torch nor a driver context is needed, and no path, host name or
environment variable enters. Two machines with equal fingerprints run each other's kernels.
"""

import os
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coldstart.system.devices.nvml import Gpu

Scalar = str | int | float | bool | None

# Inductor compiles with -march=native, so every extension a compiler may emit by itself counts; flags of the
# kernel, of virtualisation and of mitigations do not, and differ between equal machines.
_ISA = re.compile(
    r"sse\w*|ssse3|pni|avx\w*|fma4?|f16c|bmi[12]|popcnt|abm|movbe|amx_\w+|gfni|vaes|vpclmulqdq|aes|pclmulqdq|sha_ni|adx"
    r"|asimd\w*|neon|sve\w*|sme|sme[2_]\w*|bf16|i8mm|fphp|atomics|crc32"
)
_ARM_VENDORS = {"0x41": "ARM", "0x61": "Apple", "0x4e": "NVIDIA", "0xc0": "Ampere", "0x51": "Qualcomm"}


def cpu(cpuinfo: str | None = None) -> dict[str, Scalar]:
    """cpu.vendor, cpu.family, cpu.model, cpu.isa (sorted, space between), cpu.threads (usable)."""
    text = Path("/proc/cpuinfo").read_text() if cpuinfo is None else cpuinfo
    first = _first_block(text)
    flags = _flags(first)
    implementer = first.get("CPU implementer", "")
    return {
        "cpu.machine": platform.machine(),
        "cpu.vendor": first.get("vendor_id") or _ARM_VENDORS.get(implementer, implementer) or None,
        "cpu.family": first.get("cpu family") or first.get("CPU architecture"),
        "cpu.model": first.get("model") or first.get("CPU part"),
        "cpu.isa": " ".join(sorted(flag for flag in set(flags) if _ISA.fullmatch(flag))),
        "cpu.threads": usable_threads(),
    }


def flags() -> str:
    """Every flag of the processor, those of the kernel included: what a process that was frozen may have asked for."""
    with Path("/proc/cpuinfo").open() as file:  # the first processor's block alone
        return " ".join(sorted(_flags(_first_block(file.read(1 << 13)))))


def usable_threads() -> int:
    """Processors this process may run on."""
    return len(os.sched_getaffinity(0))


def gpu() -> dict[str, Scalar]:
    """gpu.* of the first device; empty where there is none. How many are used is an engine argument.

    Where it cannot be told which kind of device is CUDA's first, all kinds are named and nothing else is said.
    """
    from coldstart.system.devices import nvml

    state = nvml.machine()
    if state.undecided:
        return {"gpu.name": " or ".join(state.undecided)}
    return _gpu_fields(state.devices[0]) if state.devices else {}


def fingerprint() -> dict[str, Scalar]:
    """All hardware fields, named as in the key without its ``hardware.`` prefix."""
    return {**cpu(), **gpu()}


def _gpu_fields(first: "Gpu") -> dict[str, Scalar]:
    return {
        "gpu.name": first.name,
        "gpu.multiprocessors": first.multiprocessors,
        "gpu.compute_capability": first.compute_capability,
        "gpu.memory_bytes": first.memory_bytes,
        "gpu.driver": first.branch,
    }


def _flags(block: dict[str, str]) -> list[str]:
    return (block.get("flags") or block.get("Features") or block.get("isa") or "").split()


def _first_block(text: str) -> dict[str, str]:
    block = text.strip().split("\n\n", 1)[0]
    pairs = (line.partition(":") for line in block.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
