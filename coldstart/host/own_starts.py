"""Models that the host starts without a request: pinned models and the default model.

They come after all pending requests. A pinned model may evict idle models; the default model starts only in free memory,
while no request waits or runs.
"""

from __future__ import annotations

from collections.abc import Iterator

from coldstart.host.eviction import has_room
from coldstart.host.model_state import STARTABLE
from coldstart.host.pending import PendingRequest
from coldstart.host.residents import Residents


def list_own_starts(residents: Residents, held: int, now: float) -> Iterator[PendingRequest]:
    """Yield the starts as requests that arrive now, so that no model in use is evicted for them.

    Args:
        residents: Models of the host.
        held: Number of pending requests.
        now: Time in seconds.
    """
    names = list(residents.pinned)
    default = residents.settings.default_model
    if default is not None and held == 0 and _may_return(residents, default):
        names.append(default)
    return (PendingRequest("", name, now) for name in names)


def _may_return(residents: Residents, name: str) -> bool:
    model = residents.models.get(name)
    if model is None or model.retired or model.state not in STARTABLE:
        return False
    changing = residents.starting() or residents.draining()
    in_use = any(other.in_flight for other in residents.models.values())
    return not changing and not in_use and has_room(residents, model)
