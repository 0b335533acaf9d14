"""Interface through which a server of the host reports its events."""

from __future__ import annotations

from typing import Protocol

from coldstart.host.launches import Launch
from coldstart.host.live.servers import Ready


class ServerObserver(Protocol):
    """Observer of the servers of a host."""

    def report_ready(self, launch: Launch, ready: Ready, mode: str, seconds: float) -> None:
        """Report that the server is ready, or awake again, `seconds` after the order."""

    def report_failed_start(self, model: str, reason: str, seconds: float) -> None:
        """Report that the start, or the wake-up, failed after `seconds`."""

    def report_asleep(self, launch: Launch) -> None:
        """Report that the server sleeps."""

    def report_memory(self, model: str, memory: int) -> None:
        """Report that the server and its template hold `memory` bytes."""

    async def measure(self, model: str, pid: int) -> int | None:
        """Return the bytes that the server's process and the model's template hold, or None. Record its GPU memory.

        Raises:
            ProcessLookupError: The process has ended.
        """
