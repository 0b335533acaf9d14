"""Link speeds and join times that starts show: saved in the fleet's state, and sent to the core.

A measurement that cannot be saved still counts until the controller ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from coldstart.fleet import events, observed
from coldstart.fleet.deployments import Deployment
from coldstart.fleet.events import Event
from coldstart.fleet.live.state import FleetState
from coldstart.host.live.log import Log


class Measurements:
    """Measurements of one fleet; `models` are the core's, `emit` sends an event to the core."""

    def __init__(
        self, state: FleetState, models: Mapping[str, Deployment], emit: Callable[[Event], None], log: Log
    ) -> None:
        self._state, self._models, self._emit, self._log = state, models, emit, log

    def record_fetch(self, server: str, size: int, seconds: float) -> None:
        """Record a fetch of `size` bytes that had the server's link to itself."""
        before = self._state.links.get(server)
        after = observed.speed(before, size, seconds)
        if after is not None and after != before:
            self._save(lambda: self._state.observe(server, after))
            self.emit_speed(server)

    def record_start(self, name: str, ranks: int, seconds: float) -> None:
        """Record how long a group of so many ranks took to join once its weights were loaded."""
        known = self._state.models.get(name)
        if known is None:
            return
        seen = self._models[name].spec.joins
        joins = {**seen, ranks: observed.joining(seen.get(ranks), seconds)}
        updated = replace(known, spec=replace(known.spec, joins=joins))
        self._save(lambda: self._state.deploy(updated))
        self._emit(events.Deployed(updated.spec))

    def emit_speed(self, server: str) -> None:
        """Send the measured speed of the server's link to the core, if there is one."""
        if (known := self._state.links.get(server)) is not None:
            self._emit(events.Rate(server, known))

    def _save(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            self._log.say("state not written", reason=error.strerror or str(error))
