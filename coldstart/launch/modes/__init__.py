"""The start modes. `LADDER` is the one list of them, in the order in which `--mode auto` tries them."""

from __future__ import annotations

from coldstart.launch.modes.fresh import FRESH
from coldstart.launch.modes.mode import StartMode
from coldstart.launch.modes.runtime_snapshot import RUNTIME_SNAPSHOT
from coldstart.launch.modes.snapshot import SNAPSHOT
from coldstart.launch.modes.standby import STANDBY
from coldstart.launch.modes.template_engine import TEMPLATE_ENGINE
from coldstart.launch.modes.template_runtime import TEMPLATE_RUNTIME

AUTO = "auto"
LADDER: list[StartMode] = [
    STANDBY,
    TEMPLATE_ENGINE,
    SNAPSHOT,
    TEMPLATE_RUNTIME,
    RUNTIME_SNAPSHOT,
    FRESH,
]


def names() -> tuple[str, ...]:
    """Return the names of all modes, the fastest first."""
    return tuple(mode.name for mode in LADDER)


def repeatable_names() -> tuple[str, ...]:
    """Return the names of the modes that a host and a benchmark can use, the fastest first."""
    return tuple(mode.name for mode in LADDER if mode.repeatable)


def find(name: str) -> StartMode:
    """Return the mode of that name. Raises KeyError where there is none."""
    return {mode.name: mode for mode in LADDER}[name]


def attempts(name: str) -> list[StartMode]:
    """Return the modes to try for `--mode NAME`, in order: the last is always `fresh`."""
    return list(LADDER) if name == AUTO else list(dict.fromkeys((find(name), FRESH)))
