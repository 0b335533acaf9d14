"""Events of the scheduler on the start-up timeline: swaps, demotions, promotions, evictions.

Invariant: without COLDSTART_TIMELINE_EVENTS no Events object exists, so a step costs one `if`.
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
        """Emit one span from `start_s` (default: now) to now."""
        now = timeline.now()
        timeline.emit(name, now if start_s is None else start_s, now, TRACK, args)
