"""Park a sleeping engine so that it uses no GPU memory, with vLLM's preparations (see `system.devices.parking`).

vLLM's `checkpoint_prepare` releases the resources that the ranks share on the GPUs, and `checkpoint_restore` creates them
again. An engine that cannot be parked stays asleep, and each server that it runs reports the reason.
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
    """Sleeping vLLM engine whose ranks can free all of their GPU memory.

    `reason` is why the engine could not be parked, or None if the last attempt succeeded.
    """

    def __init__(self, engine: Any, parking: Parking) -> None:
        self.reason: str | None = None
        self._engine, self._parking = engine, parking
        self._is_parked = self._is_lost = False
        self._busy = asyncio.Lock()

    @classmethod
    async def create(cls, engine: Any) -> ParkedEngine:
        """Park the sleeping `engine`, and return its ParkedEngine. Raises ParkingError if the engine becomes unusable."""
        reports = await engine.collective_rpc(WORKER_REPORT)
        parked = cls(engine, Parking([report["pid"] for report in reports]))
        if not await parked.park():
            raise ParkingError(parked.reason)
        return parked

    async def park(self) -> bool:
        """Park the sleeping engine. If that fails, the engine stays asleep. Return False if the engine is unusable."""
        if await self._finish(self._park):
            sys.stderr.write(f"coldstart: cannot park the engine, which stays asleep: {self.reason}\n")
        return not self._is_lost

    async def unpark(self) -> str | None:
        """Restore the engine's GPU state, after which it is asleep. Return the reason if that failed, else None."""
        with timeline.measure("restore the device", track="server"):
            return await self._finish(self._unpark)

    def close(self) -> None:
        """Stop the helper process that parks the ranks."""
        self._parking.close()

    async def _finish(self, work: Callable[[], Coroutine[Any, Any, str | None]]) -> str | None:
        """Run `work` to its end even if the caller is cancelled. Return the reason if it failed, else None."""

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
            self.reason = f"vLLM cannot prepare the checkpoint: {type(error).__name__}: {error}"
            # The next wake generates a token, which shows whether the ranks can still communicate.
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
