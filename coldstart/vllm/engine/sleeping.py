"""Wake a sleeping engine, and park one so that it uses no GPU memory (see `system.devices.parking`).

An engine is vLLM's own client in the same process, or a `RemoteEngine`. The names of vLLM's calls are the same. At level 2
vLLM discards the weights, and no wake-up loads them again: without `wake_engine` the engine would compute with garbage.

vLLM's `checkpoint_prepare` releases the resources that the ranks share on the GPUs, and `checkpoint_restore` creates them
again. An engine that cannot be parked stays asleep.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partialmethod
from typing import Any

from coldstart.contract.graphs import WORKER_REPORT
from coldstart.system import timeline
from coldstart.system.devices.parking import Parking, ParkingError

Post = Callable[[str, bytes], Awaitable[bytes]]
"""Sends a POST request with a path and a body, and returns the body of a successful response. Raises OSError for any other."""


class RemoteEngine:
    """Engine of a server, called through the routes of vLLM's development mode. Its methods raise OSError."""

    def __init__(self, post: Post) -> None:
        self._post = post

    async def sleep(self, level: int) -> None:
        await self._post(f"/sleep?level={level}", b"")

    async def wake_up(self, tags: Sequence[str] = ()) -> None:
        query = "&".join(f"tags={tag}" for tag in tags)
        await self._post(f"/wake_up?{query}" if query else "/wake_up", b"")

    async def collective_rpc(self, method: str) -> Any:
        """Call a method of each worker, and return the results."""
        response = await self._post("/collective_rpc", json.dumps({"method": method}).encode())
        return json.loads(response)["results"]

    checkpoint_prepare = partialmethod(collective_rpc, "checkpoint_prepare")
    checkpoint_restore = partialmethod(collective_rpc, "checkpoint_restore")


async def wake_engine(engine: Any, level: int) -> None:
    """Wake all memory of the engine. At level 2, reload the weights before allocating the KV cache."""
    with timeline.measure("wake the engine", track="server"):
        await engine.wake_up(**({} if level == 1 else {"tags": ["weights"]}))
    if level == 1:
        return
    with timeline.measure("load weights", track="server"):
        await engine.collective_rpc("reload_weights")
    with timeline.measure("allocate the KV cache", track="server"):
        await engine.wake_up(tags=["kv_cache"])


class ParkedEngine:
    """Sleeping vLLM engine whose ranks can free all of their GPU memory.

    `reason` is why the last attempt to park it failed, or None. An engine that `is_lost` is unusable.
    """

    def __init__(self, engine: Any, parking: Parking) -> None:
        self.reason: str | None = None
        self._engine, self._parking = engine, parking
        self.is_lost = self._is_parked = False
        self._busy = asyncio.Lock()

    @classmethod
    async def find(cls, engine: Any) -> ParkedEngine:
        """Return the ParkedEngine of `engine`, which is not parked yet. Raises ParkingError if its processes are unknown."""
        try:
            reports = await engine.collective_rpc(WORKER_REPORT)
            return cls(engine, Parking([report["pid"] for report in reports]))
        except Exception as error:  # vLLM raises various errors if its workers lack the method
            raise ParkingError(f"the workers do not report their processes: {error}") from error

    async def park(self) -> str | None:
        """Park the sleeping engine. Return the reason if that failed, else None. Unless lost, the engine then stays asleep."""
        return await self._finish(self._park)

    async def unpark(self) -> str | None:
        """Restore the engine's GPU state, after which it is asleep. Return the reason if that failed, else None."""
        with timeline.measure("restore the device", track="server"):
            return await self._finish(self._unpark)

    async def close(self) -> None:
        """Stop the helper process that parks the ranks, after the operation in progress."""
        async with self._busy:
            self._parking.close()

    async def _finish(self, work: Callable[[], Coroutine[Any, Any, str | None]]) -> str | None:
        """Run `work` to its end even if the caller is cancelled. Return the reason if it failed, else None."""

        async def guarded() -> str | None:
            async with self._busy:
                try:
                    return await work()
                except Exception as error:  # noqa: BLE001 - vLLM raises various errors, and its engine is then unusable
                    self.is_lost, self.reason = True, f"{type(error).__name__}: {error}"
                    return self.reason

        return await asyncio.shield(guarded())

    async def _park(self) -> str | None:
        if self._is_parked or self.is_lost:
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
            return self.reason if self.is_lost else None
        reason = await asyncio.to_thread(self._parking.unpark)
        if reason is None:
            self._is_parked = False
            await self._call("checkpoint_restore")
        return reason

    async def _call(self, name: str) -> None:
        if (function := getattr(self._engine, name, None)) is not None:
            await function()
