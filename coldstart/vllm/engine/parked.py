"""A sleeping engine that leaves nothing on its devices: `system.devices.parking` with what vLLM does before and after it.

vLLM's `checkpoint_prepare` takes down what the ranks share on the devices, `checkpoint_restore` builds it again. An engine that
cannot be parked continues to sleep, and each of its servers reports the reason.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from coldstart.contract.graphs import WORKER_REPORT
from coldstart.system import timeline
from coldstart.system.devices.parking import Parking, ParkingError


class ParkedEngine:
    """vLLM's sleeping engine with the processes of its ranks. `reason` is why it only sleeps, None if it is parked."""

    def __init__(self, engine: Any, parking: Parking) -> None:
        self.reason: str | None = None
        self._engine, self._parking = engine, parking
        self._is_parked = self._is_lost = False
        self._busy = asyncio.Lock()

    @classmethod
    async def create(cls, engine: Any) -> ParkedEngine:
        """Park the sleeping engine for the first time. Raises ParkingError if it is useless afterwards."""
        reports = await engine.collective_rpc(WORKER_REPORT)
        parked = cls(engine, Parking([report["pid"] for report in reports]))
        if not await parked.park():
            raise ParkingError(parked.reason)
        return parked

    async def park(self) -> bool:
        """Take the sleeping engine off its devices, or leave it asleep. Return False if it is useless now."""
        if await self._finish(self._park):
            sys.stderr.write(f"coldstart: the engine is not parked: {self.reason}\n")
        return not self._is_lost

    async def unpark(self) -> str | None:
        """Put the engine back on its devices, where it sleeps. Return why this failed, None if it did not."""
        with timeline.measure("restore the device", track="server"):
            return await self._finish(self._unpark)

    def close(self) -> None:
        """End the helper process."""
        self._parking.close()

    async def _finish(self, work: Callable[[], Coroutine[Any, Any, str | None]]) -> str | None:
        """Do the work to its end, even if the caller is cancelled. Return why it failed."""

        async def guarded() -> str | None:
            async with self._busy:
                try:
                    return await work()
                except Exception as error:  # noqa: BLE001 - vLLM raises various errors, and its engine is then unusable
                    self._is_lost, self.reason = True, f"{type(error).__name__}: {error}"
                    return self.reason

        return await asyncio.shield(guarded())

    async def _park(self) -> str | None:
        if self._is_parked or self._is_lost:
            return self.reason
        try:
            await self._call("checkpoint_prepare")
        except Exception as error:  # noqa: BLE001 - of any rank
            self.reason = f"vLLM cannot prepare it: {type(error).__name__}: {error}"
            # The token that a wake generates shows whether the ranks still reach each other.
            with suppress(Exception):
                await self._call("checkpoint_restore")
            return self.reason
        self.reason = await asyncio.to_thread(self._parking.park)
        self._is_parked = self.reason is None
        if not self._is_parked:
            await self._call("checkpoint_restore")
        return self.reason

    async def _unpark(self) -> str | None:
        if not self._is_parked:
            return self.reason if self._is_lost else None
        reason = await asyncio.to_thread(self._parking.unpark)
        if reason is None:
            self._is_parked = False
            await self._call("checkpoint_restore")
        return reason

    async def _call(self, name: str) -> None:
        if (function := getattr(self._engine, name, None)) is not None:
            await function()
