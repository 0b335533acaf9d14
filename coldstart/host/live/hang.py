"""Detect a server that makes no progress.

A server hangs if one of these conditions holds at each check during `hang_timeout_s`:

- during its start, a signal has stopped one of its processes;
- its API process does not answer GET /health;
- requests wait for the next byte of their answers, and no body of any answer grew; and no counter of the engine in
  GET /metrics has changed; and its processes, except the API process, have used almost no processor time.

A long prefill or compilation is no hang: the API process answers, and the engine computes. A client that does not read
its answer is no hang: no byte is waited for. Without the engine's counters (`--disable-log-stats`) the third condition
never holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from coldstart.host.live.servers import ModelServer
from coldstart.host.live.upstream import Upstream

# Number of intervals between checks in `hang_timeout_s`.
INTERVALS = 4
# Share of one processor below which an engine does not compute.
_IDLE_SHARE = 0.05
_COUNTER = b"vllm:"


@dataclass(frozen=True, slots=True)
class _Seen:
    """Observation of one check: bytes of all bodies, and the engine's counters, None if they were not readable."""

    received: int
    counters: bytes | None


class HangDetector:
    """Observer of one server, whose requests use `upstream`; its own requests have other connections."""

    def __init__(self, server: ModelServer, upstream: Upstream) -> None:
        self._server, self._upstream = server, upstream
        self._probe = Upstream(server.socket)
        self._seen = _Seen(0, None)

    async def find(self, timeout_s: Callable[[], float]) -> str:
        """Wait until the server hangs, and return the reason. `timeout_s` returns the current `hang_timeout_s`."""
        before, failed = "", 0
        try:
            while failed <= INTERVALS:
                interval_s = timeout_s() / INTERVALS
                _, reason = await asyncio.gather(asyncio.sleep(interval_s), self._check(interval_s))
                failed = failed + 1 if reason and reason == before else int(bool(reason))
                before = reason
        finally:
            self._probe.close()
        return f"{before} for {timeout_s():g} s"

    async def _check(self, interval_s: float) -> str:
        """Return which condition holds; empty if none does."""
        if not self._server.ready.done():
            stopped = await asyncio.to_thread(self._server.is_stopped)
            return "a process of the start was stopped" if stopped else ""
        if await self._ask("/health", interval_s) is None:
            return "the API server did not answer"
        return "the engine made no step" if await self._stands_still(interval_s) else ""

    async def _stands_still(self, interval_s: float) -> bool:
        counters = await self._ask("/metrics", interval_s)
        lines = [line for line in (counters or b"").splitlines() if line.startswith(_COUNTER)]
        seen = _Seen(self._upstream.received, b"\n".join(lines) if lines else None)
        before, self._seen = self._seen, seen
        used_s = await asyncio.to_thread(self._server.used_processor_s)
        unchanged = seen.counters is not None and seen == before
        return unchanged and self._upstream.awaits_bytes and used_s < _IDLE_SHARE * interval_s

    async def _ask(self, path: str, limit_s: float) -> bytes | None:
        """Return the body of the answer; None if there is none within `limit_s` seconds."""
        with suppress(OSError):  # includes TimeoutError
            async with asyncio.timeout(limit_s), await self._probe.request("GET", path) as answer:
                return await answer.read()
        return None
