"""Log of the requests that a gateway refuses because of their key or origin."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf

from coldstart.host.client_keys import ClientKey
from coldstart.host.live.answers import Scope
from coldstart.host.live.front import Front

CLIENT = "coldstart.client"
"""Member of a scope: the client whose key the request has."""
INTERVAL_S = 60.0
MAX_PATH = 120
_STATUSES = (401, 403, 429)


class RefusalLog:
    """Writes one line per client and minute to the log of `front`, so that no number of requests fills the disk.

    All requests without a known key count as one client.
    """

    def __init__(self, front: Front, clock: Callable[[], float] = time.monotonic) -> None:
        self._front, self._clock = front, clock
        self._due: dict[str, float] = {}

    def record(self, scope: Scope, status: int) -> None:
        """Log the refusal, unless it has another reason than the key or its client has a line of this minute."""
        client: ClientKey | None = scope.get(CLIENT)
        name, now = client.name if client else "unknown", self._clock()
        if status in _STATUSES and now >= self._due.get(name, -inf):
            self._due[name] = now + INTERVAL_S
            self._front.log.say("request refused", client=name, path=scope["path"][:MAX_PATH], status=status)
