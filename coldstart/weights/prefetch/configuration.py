"""The prefetcher's settings, read from its environment when it starts.

COLDSTART_PREFETCH_MEMORY_BYTES, _STREAMS, _IDLE_S and _PATIENCE_S; without the first, half of the memory that is
available (control groups respected) when the first request needs memory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

PREFIX = "COLDSTART_PREFETCH_"
# Weights are read by workers that need memory of their own for them: at least as much again.
SHARE = 0.5


@dataclass(frozen=True)
class Settings:
    """`memory_bytes` None means SHARE of what is available; `patience_s` is how long a dead source is tried again."""

    memory_bytes: int | None = None
    streams: int = 4
    idle_s: float = 600.0
    patience_s: float = 60.0


def given(**settings: float | None) -> dict[str, str]:
    """The variables that set these fields of Settings; None leaves one as it is."""
    return {PREFIX + name.upper(): str(value) for name, value in settings.items() if value is not None}


def from_environment(environment: Mapping[str, str] = os.environ) -> Settings:
    """The settings; raises ValueError naming the variable whose value is no number or out of bounds."""
    memory = _number(environment, "MEMORY_BYTES", 0, 0)
    return Settings(
        int(memory) if PREFIX + "MEMORY_BYTES" in environment else None,
        int(_number(environment, "STREAMS", Settings.streams, 1)),
        _number(environment, "IDLE_S", Settings.idle_s, 0),
        _number(environment, "PATIENCE_S", Settings.patience_s, 0),
    )


def _number(environment: Mapping[str, str], name: str, otherwise: float, least: float) -> float:
    text = environment.get(PREFIX + name, str(otherwise))
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not least <= value < float("inf"):
        raise ValueError(f"{PREFIX}{name} is {text!r}, wanted a number of at least {least}")
    return value


def budget(settings: Settings) -> int:
    """Bytes that the prefetcher may hold."""
    if settings.memory_bytes is not None:
        return settings.memory_bytes
    from coldstart.machine.processes import available_memory

    return int(SHARE * available_memory())
