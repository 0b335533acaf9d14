"""The prefetcher's settings, read from its environment when it starts.

Without a size, half of the memory that is available (control groups respected) when the first request needs memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from coldstart.contract import environment

PREFIX = f"{environment.PREFIX}_PREFETCH_"
# Weights are read by workers that need memory of their own for them: at least as much again.
SHARE = 0.5


@dataclass(frozen=True)
class PrefetchSettings:
    """`memory_bytes` None means SHARE of what is available; `patience_s` is how long a dead source is tried again."""

    memory_bytes: int | None = None
    streams: int = int(environment.PREFETCH_STREAMS.default)
    idle_s: float = environment.PREFETCH_IDLE_S.default
    patience_s: float = environment.PREFETCH_PATIENCE_S.default


def given(**settings: float | None) -> dict[str, str]:
    """The variables that set these fields of PrefetchSettings; None leaves one as it is."""
    return {PREFIX + name.upper(): str(value) for name, value in settings.items() if value is not None}


def from_environment(variables: Mapping[str, str] | None = None) -> PrefetchSettings:
    """The settings; raises ValueError naming the variable whose value is no number or out of bounds."""
    memory = environment.PREFETCH_MEMORY_BYTES.read(variables)
    return PrefetchSettings(
        int(memory) if memory >= 0 else None,
        int(environment.PREFETCH_STREAMS.read(variables)),
        environment.PREFETCH_IDLE_S.read(variables),
        environment.PREFETCH_PATIENCE_S.read(variables),
    )


def budget(settings: PrefetchSettings) -> int:
    """Bytes that the prefetcher may hold."""
    if settings.memory_bytes is not None:
        return settings.memory_bytes
    from coldstart.system.proc.processes import available_memory

    return int(SHARE * available_memory())
