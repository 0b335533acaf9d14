"""Start mode `fresh`: a new process. It is available everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coldstart.serve import launch
from coldstart.serve.modes.mode import Reason, await_ready

if TYPE_CHECKING:
    from coldstart.serve.launch import Running
    from coldstart.serve.request import ServerStart
    from coldstart.serve.ttft import StartCosts


class FreshMode:
    """A new process that imports, loads and builds everything itself."""

    name = "fresh"
    loads_weights = True
    repeatable = True
    probes = ()

    def unavailable(self, start: ServerStart | None = None) -> Reason | None:
        """Return None."""
        return None

    def launch(self, start: ServerStart) -> Running:
        """As StartMode."""
        return await_ready(start, launch.fresh(start.plan))

    def remaining(self, costs: StartCosts) -> StartCosts | None:
        """Return all `costs`."""
        return costs


FRESH = FreshMode()
