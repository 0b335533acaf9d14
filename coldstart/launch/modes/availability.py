"""The start modes that this machine permits, for the doctor."""

from __future__ import annotations

from collections.abc import Sequence

from coldstart.launch import modes
from coldstart.launch.modes.mode import Reason
from coldstart.system import doctor
from coldstart.system.probes import Probe


def permitted(results: Sequence[Probe]) -> dict[str, bool]:
    """Return for each mode whether the machine with these probe results can start servers by it."""
    good = {probe.name for probe in results if probe.status == "ok"}
    able = doctor.able(results)
    return {
        mode.name: able and not mode.unavailable() and good.issuperset(mode.probes) for mode in modes.LADDER
    }


def reasons() -> dict[str, Reason]:
    """Return why the installed vLLM lacks a mode, for each that it lacks."""
    return {mode.name: why for mode in modes.LADDER if (why := mode.unavailable()) is not None}
