"""One fetch of a model server that starts, as its node sees it: told its rate until it has ended, and what it came to.

The prefetcher is another process, which may not run yet, or no more: so it is told the rate again whenever it is asked how
far it is, and one that was started anew goes on at the right one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from coldstart.contract.weights import PacedFetch
from coldstart.weights.prefetch import client

LOOK_S = 0.25
Tell = Callable[[PacedFetch], Mapping[str, Any] | None]


class NodeFetch:
    """That of `pace`, which `tell` tells the prefetcher."""

    def __init__(self, pace: PacedFetch, tell: Tell = client.told) -> None:
        self.pace, self._tell = pace, tell
        self._changed = asyncio.Event()

    def change(self, rate: float | None) -> None:
        """Another rate from now on, in bytes/s; None: as it comes."""
        self.pace = PacedFetch(self.pace.name, rate, self.pace.background)
        self._changed.set()

    async def ended(self) -> Mapping[str, Any]:
        """What the prefetcher says of it once all is there; see `client.told`. Waits for as long as it is not begun."""
        while True:
            self._changed.clear()
            said = None
            with suppress(client.PrefetchError, OSError):
                said = await asyncio.to_thread(self._tell, self.pace)
            if said is not None and said["ended"]:
                return said
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), LOOK_S)
