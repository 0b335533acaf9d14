"""Describe the machine and the versions of a measurement, without host names and paths, so that it can be published."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import coldstart
from coldstart.system import runtime
from coldstart.system.proc import processes


def describe_machine() -> dict[str, object]:
    """Return the CPU model, usable cores, memory in bytes, kernel release and load average of this machine."""
    return {
        "cpu": processes.read_field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "load_1min": os.getloadavg()[0],
    }


def is_same_machine(first: dict[str, object], second: dict[str, object]) -> bool:
    """Return whether times on two machines are comparable: same CPU model and number of cores, and memory within 2%."""
    memories = [facts.get("memory_bytes") for facts in (first, second)]
    first_bytes, second_bytes = [value if isinstance(value, int) else 0 for value in memories]
    has_same_cpu = all(first.get(name) == second.get(name) for name in ("cpu", "cores"))
    return has_same_cpu and abs(first_bytes - second_bytes) <= 0.02 * max(first_bytes, second_bytes)


def list_versions() -> dict[str, str]:
    """Return the versions of Python, coldstart, torch and vLLM, read from package metadata."""
    by_name = {name: runtime.find_installed_version(name) for name in ("torch", *runtime.VLLM_DISTRIBUTIONS)}
    installed = {name: version for name, version in by_name.items() if version}
    return {"python": platform.python_version(), "coldstart": coldstart.__version__} | installed


def format_utc_now() -> str:
    """Return the current UTC time in ISO 8601 format."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def strip_paths(arguments: Sequence[str]) -> list[str]:
    """Shorten each path in the arguments, including those after `=`, to its last component."""
    return [_strip_path(argument) for argument in arguments]


def _strip_path(argument: str) -> str:
    flag, equals, value = argument.partition("=") if argument.startswith("-") else ("", "", argument)
    short = Path(value).name if value.startswith(("/", "~", ".")) else value
    return flag + equals + short
