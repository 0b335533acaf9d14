"""Models that the host starts without a request: pinned, prewarmed, and the default model.

They come after all pending requests, in this order. Pinned and prewarmed models may evict idle models; the default model
starts only in free memory, while no request waits or runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from coldstart.host.eviction import has_room
from coldstart.host.model_state import STARTABLE, Model, State
from coldstart.host.pending import PendingRequest
from coldstart.host.residents import Residents


class OwnStarts:
    """Starts without a request, of the models in `residents`."""

    def __init__(self, residents: Residents) -> None:
        self._residents = residents
        self._prewarming: dict[str, float] = {}

    def prewarm(self, model: Model, now: float) -> None:
        """Start the model once memory is free, at the latest after the longest time that a request waits."""
        if model.state is State.READY:
            # Its idle time begins again.
            model.since = now
        elif not model.retired:
            self._prewarming[model.spec.name] = now + self._residents.settings.hold_s

    def end_prewarming(self, name: str) -> bool:
        """Forget the prewarming of a model; return whether there was one."""
        return self._prewarming.pop(name, None) is not None

    def take_expired(self, now: float) -> list[str]:
        """Forget and return the models whose prewarming found no memory in time."""
        found = [name for name, end in self._prewarming.items() if end <= now]
        for name in found:
            del self._prewarming[name]
        return found

    def deadline(self, now: float) -> float:
        """Return when the prewarming of a model expires, or when one that failed before may start; else infinity."""
        times = [*self._prewarming.values()]
        times += [self._residents.models[name].retry_at for name in self._prewarming]
        return min((time for time in times if time > now), default=inf)

    def list_starts(self, held: int, now: float) -> Iterator[PendingRequest]:
        """Yield the starts as requests that arrive now, so that no model in use is evicted for them.

        `held` is the number of pending requests.
        """
        names = [*self._residents.pinned, *self._prewarming]
        default = self._residents.settings.default_model
        if default is not None and held == 0 and self._may_return(default):
            names.append(default)
        return (PendingRequest("", name, now) for name in names)

    def _may_return(self, name: str) -> bool:
        residents = self._residents
        model = residents.models.get(name)
        if model is None or model.retired or model.state not in STARTABLE:
            return False
        changing = residents.starting() or residents.draining()
        in_use = any(other.in_flight for other in residents.models.values())
        return not changing and not in_use and has_room(residents, model)
