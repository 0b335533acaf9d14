"""Report the start modes that this machine permits, for `coldstart doctor`."""

from __future__ import annotations

from collections.abc import Sequence

from coldstart.launch import modes
from coldstart.launch.modes.mode import Reason, StartMode
from coldstart.system import probes
from coldstart.system.probes import Probe


def permitted(results: Sequence[Probe]) -> dict[str, bool]:
    """Return for each mode whether the machine with these probe results can start servers with it."""
    good = {probe.name for probe in results if probe.status == "ok"}
    able = probes.able(results)
    return {
        mode.name: able and not mode.unavailable() and good.issuperset(mode.probes) for mode in modes.LADDER
    }


def find_obstacle(mode: StartMode) -> Reason | None:
    """Return why CRIU cannot run on this machine, as the doctor reports it, for a mode that needs it."""
    if "criu" not in mode.probes or (checked := probes.criu()).status == "ok":
        return None
    return Reason(f"CRIU cannot run: {checked.found}", checked.hint or "")


def reasons() -> dict[str, Reason]:
    """Return for each mode that the installed vLLM lacks the reason."""
    return {mode.name: why for mode in modes.LADDER if (why := mode.unavailable()) is not None}
