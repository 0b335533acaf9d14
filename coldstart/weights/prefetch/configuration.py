"""Prefetcher settings, read from its environment at start.

Without a memory size, the prefetcher uses half of the available memory (within the control group's limit),
measured when the first request needs memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coldstart.contract import environment

PREFIX = f"{environment.PREFIX}_PREFETCH_"
# Each worker copies the weights, and needs at least as much memory as the prefetcher.
SHARE = 0.5


@dataclass(frozen=True)
class PrefetchSettings:
    """Memory, streams and timeouts of the prefetcher.

    `memory_bytes` None means SHARE of the available memory. `patience_s` is the time in seconds during which
    an unavailable source is retried.
    """

    memory_bytes: int | None = None
    streams: int = int(environment.PREFETCH_STREAMS.default)
    idle_s: float = environment.PREFETCH_IDLE_S.default
    patience_s: float = environment.PREFETCH_PATIENCE_S.default


def format_variables(**settings: float | None) -> dict[str, str]:
    """Return the environment variables that set these fields of PrefetchSettings; None leaves a field unset."""
    return {PREFIX + name.upper(): str(value) for name, value in settings.items() if value is not None}


def read_settings(variables: Mapping[str, str] | None = None) -> PrefetchSettings:
    """Return the settings. Raises ValueError if a variable is not a number or out of range."""
    memory = environment.PREFETCH_MEMORY_BYTES.read(variables)
    return PrefetchSettings(
        int(memory) if memory >= 0 else None,
        int(environment.PREFETCH_STREAMS.read(variables)),
        environment.PREFETCH_IDLE_S.read(variables),
        environment.PREFETCH_PATIENCE_S.read(variables),
    )


def budget(settings: PrefetchSettings) -> int:
    """Return the number of bytes that the prefetcher may hold."""
    if settings.memory_bytes is not None:
        return settings.memory_bytes
    from coldstart.system.proc.processes import available_memory

    return int(SHARE * available_memory())
