"""Start mode `fresh`: a new process. It is available everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coldstart.launch.modes.mode import Reason, await_ready

if TYPE_CHECKING:
    from coldstart.launch.request import ServerStart
    from coldstart.launch.server_process import Running


class FreshMode:
    """Start of a new process that imports, loads and builds everything itself."""

    name = "fresh"
    loads_weights = True
    repeatable = True
    probes = ()

    def unavailable(self, start: ServerStart | None = None) -> Reason | None:
        """Return None."""
        return None

    def launch(self, start: ServerStart) -> Running:
        """Start a new server process, as specified by StartMode."""
        from coldstart.launch import server_process

        return await_ready(start, server_process.fresh(start.plan))


FRESH = FreshMode()
