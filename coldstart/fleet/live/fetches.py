"""One weight fetch of a starting model server, controlled by its node.

The prefetcher is another process, which may not have started or may restart. So each query of its progress repeats
the current rate.
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
    """Fetch `pace` of one server; `tell` sends it to the prefetcher."""

    def __init__(self, pace: PacedFetch, tell: Tell = client.set_pace) -> None:
        self.pace, self._tell = pace, tell
        self._changed = asyncio.Event()

    def change(self, rate: float | None) -> None:
        """Change the rate, in bytes/s; None: no limit."""
        self.pace = PacedFetch(self.pace.name, rate, self.pace.background)
        self._changed.set()

    async def wait(self) -> Mapping[str, Any]:
        """Return the prefetcher's report after the fetch has ended; see `client.set_pace`. Waits also for its begin."""
        while True:
            self._changed.clear()
            said = None
            with suppress(client.PrefetchError, OSError):
                said = await asyncio.to_thread(self._tell, self.pace)
            if said is not None and said["ended"]:
                return said
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), LOOK_S)
