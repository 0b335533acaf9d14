"""Detect a server that makes no progress.

A server hangs if one of these conditions holds at each check during `hang_timeout_s`:

- during its start, or if it has no API process, a signal has stopped one of its processes;
- its API process does not answer GET /health;
- requests wait for the next byte of their answers; and no counter of the engine in GET /metrics has changed; and its
  processes, except the API process, have used almost no CPU time.

A long prefill or compilation does not count as a hang: the API process answers, and the engine computes. Nor does a client
that does not read its answer: no byte is waited for. Without the engine's counters (`--disable-log-stats`) the third condition
never holds.

Answers of a fleet's server do not pass through the observer. Requests then wait if the engine's gauges show some.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from coldstart.host.live.servers import ModelServer
from coldstart.host.live.upstream import Upstream

# Number of intervals between checks in `hang_timeout_s`.
INTERVALS = 4
# Share of one processor below which an engine does not compute.
_IDLE_SHARE = 0.05
_COUNTER = b"vllm:"
_HOLDS_REQUESTS = re.compile(rb"^vllm:num_requests_(?:running|waiting)(?:{.*})? (?!0(?:\.0)?$)", re.MULTILINE)


class HangDetector:
    """Detects a hang of one server. `place` is the address of its API process, None without one.

    Its requests use `upstream`, None if they do not pass through this process. The detector sends its own requests over
    other connections.
    """

    def __init__(
        self, server: ModelServer, place: Path | tuple[str, int] | None, upstream: Upstream | None = None
    ) -> None:
        self._server, self._upstream = server, upstream
        self._probe = Upstream(place) if place is not None else None
        self._counters = b""

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
            if self._probe is not None:
                self._probe.close()
        return f"{before} for {timeout_s():g} s"

    async def _check(self, interval_s: float) -> str:
        """Return which condition holds; empty if none does."""
        if self._probe is None or not self._server.ready.done():
            stopped = await asyncio.to_thread(self._server.is_stopped)
            what = "rank" if self._server.ready.done() else "start"
            return f"a process of the {what} was stopped" if stopped else ""
        if await _ask(self._probe, "/health", interval_s) is None:
            return "the API server did not answer"
        return "the engine made no step" if await self._stands_still(self._probe, interval_s) else ""

    async def _stands_still(self, probe: Upstream, interval_s: float) -> bool:
        metrics = await _ask(probe, "/metrics", interval_s)
        lines = [line for line in (metrics or b"").splitlines() if line.startswith(_COUNTER)]
        before, self._counters = self._counters, b"\n".join(lines)
        used_s = await asyncio.to_thread(self._server.used_processor_s)
        if self._upstream is not None:
            waits = self._upstream.awaits_bytes
        else:
            waits = _HOLDS_REQUESTS.search(self._counters) is not None
        # Without counters that can be read nothing is known.
        return (
            bool(self._counters) and self._counters == before and waits and used_s < _IDLE_SHARE * interval_s
        )


async def _ask(probe: Upstream, path: str, limit_s: float) -> bytes | None:
    """Return the body of the answer; None if there is none within `limit_s` seconds."""
    with suppress(OSError):  # includes TimeoutError
        async with asyncio.timeout(limit_s), await probe.request("GET", path) as answer:
            return await answer.read()
    return None
