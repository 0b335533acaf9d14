"""Schedule of prewarming: each model with a cron expression is ordered to start at its moments.

The wall clock can jump, and a machine can sleep. So the clock is read at least every CHECK_S seconds, and a moment that
passed more than LATE_S seconds ago is reported as missed instead.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from coldstart.host.configuration import find_next_moment

CHECK_S = 20.0
LATE_S = 60.0


class Schedule:
    """Next moment of each model. `prewarm` receives a model at its moment, `miss` a model and the reason."""

    def __init__(
        self,
        prewarm: Callable[[str], None],
        miss: Callable[[str, str], None],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._prewarm, self._miss, self._now = prewarm, miss, now
        self._crontabs: dict[str, str] = {}
        self._next: dict[str, float] = {}
        self._checked = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def configure(self, crontabs: Mapping[str, str]) -> None:
        """Apply the cron expressions by model; the next moments of unchanged ones are retained."""
        now = self._now()
        self._next = {
            model: self._next[model]
            if self._crontabs.get(model) == crontab
            else find_next_moment(crontab, now)
            for model, crontab in crontabs.items()
        }
        self._crontabs = dict(crontabs)
        self.check()

    def get_next(self, model: str) -> float | None:
        """Return the model's next moment as Unix time; None if it has no schedule."""
        return self._next.get(model)

    def check(self) -> None:
        """Order the starts that are due, and wait for the next moment."""
        now = self._now()
        was_set_back, self._checked = now < self._checked, now
        for model, at in list(self._next.items()):
            if at > now and not was_set_back:
                continue
            self._next[model] = find_next_moment(self._crontabs[model], now)
            if at <= now - LATE_S:
                self._miss(model, f"the moment passed {now - at:.0f} s ago, while the host did not run")
            elif at <= now:
                self._prewarm(model)
        self._wait(now)

    def close(self) -> None:
        """Stop scheduling starts."""
        self._crontabs, self._next = {}, {}
        self._wait(0.0)

    def _wait(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._next:
            wait = min(CHECK_S, max(0.0, min(self._next.values()) - now))
            self._timer = asyncio.get_running_loop().call_later(wait, self.check)
