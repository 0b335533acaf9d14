"""What a server of the host reports while it lives, and to whom."""

from __future__ import annotations

from typing import Protocol

from coldstart.host.launches import Launch
from coldstart.host.live.servers import Ready


class ServerObserver(Protocol):
    """Receives what happens to the server of a model."""

    def on_ready(self, launch: Launch, ready: Ready, mode: str, seconds: float) -> None:
        """The server is ready, or awake again, `seconds` after the order."""

    def on_start_failed(self, model: str, reason: str, seconds: float) -> None:
        """The start, or the wake-up, failed after `seconds`."""

    def on_asleep(self, launch: Launch) -> None:
        """The server sleeps."""

    def on_measured(self, model: str, memory: int) -> None:
        """The server and its template hold `memory` bytes."""

    def measure(self, model: str, pid: int) -> int | None:
        """Return the bytes that the server's process and the model's template hold, or None. Blocks."""
