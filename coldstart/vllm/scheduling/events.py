"""The scheduler's events on the start-up timeline: swaps, demotions, promotions, evictions.

Invariant: without COLDSTART_TIMELINE_EVENTS there is no Events object, so a step asks one `if`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from coldstart.system import timeline

TRACK = "scheduler"


class Events:
    @classmethod
    def enabled(cls, environment: Mapping[str, str] = os.environ) -> Events | None:
        return cls() if environment.get(timeline.EVENTS_VARIABLE) else None

    def note(self, name: str, start_s: float | None = None, **args: object) -> None:
        """One span from `start_s` (the present, unless given) to now."""
        now = timeline.now()
        timeline.emit(name, now if start_s is None else start_s, now, TRACK, args)
