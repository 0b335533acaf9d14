"""What the daemon knows of one connection: its lease, what it was told, what is still to be sent."""

from __future__ import annotations

import os
import socket
from typing import Any

from coldstart.system.ipc.json_lines import Channel, encode, send_some
from coldstart.weights.prefetch.model import PrefetchedModel
from coldstart.weights.prefetch.paces import FetchPace
from coldstart.weights.prefetch.schedule import Lease, UnitEntry, UnitState

# A client that does not read what it asked for is let go before it takes the daemon's memory.
_MAX_UNSENT = 16 << 20


class ClientConnection:
    """One connection. Never blocks; `gone` is set when it is to be dropped."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.channel = Channel(connection)
        self.model: PrefetchedModel | None = None
        self.lease: Lease | None = None
        self.pace: FetchPace | None = None
        self.early = self.gone = False
        self.events: str | None = None
        self.began = 0.0
        self._unsent = bytearray()
        self._descriptor: int | None = None

    @property
    def waiting_to_send(self) -> bool:
        """Whether it must be told more when its socket takes more."""
        return bool(self._unsent)

    def say(self, message: dict[str, Any], descriptor: int | None = None) -> None:
        """Send a message, with a descriptor that is closed when it was sent."""
        if descriptor is not None:
            self._descriptor = descriptor
        self._unsent += encode(message)
        self.flush()
        self.gone = self.gone or len(self._unsent) > _MAX_UNSENT

    def flush(self) -> None:
        """Send what the socket takes now."""
        try:
            while self._unsent:
                beside = () if self._descriptor is None else (self._descriptor,)
                sent = send_some(self.channel.socket, self._unsent, beside)
                del self._unsent[:sent]
                self._close_descriptor()
        except BlockingIOError:
            pass
        except OSError:
            self.gone = True

    def tell(self, entries: list[UnitEntry]) -> None:
        """Which units are ready, or given up and why."""
        ready = [
            [e.unit.file, *piece] for e in entries if e.state is UnitState.READY for piece in e.unit.pieces
        ]
        if ready:
            self.say({"ready": ready})
        for entry in entries:
            if entry.state is UnitState.FAILED:
                pieces = [[entry.unit.file, *piece] for piece in entry.unit.pieces]
                self.say({"failed": pieces, "reason": entry.reason})

    def _close_descriptor(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def close(self) -> None:
        """Close the connection; its lease ends."""
        self._close_descriptor()
        self.channel.close()
        if self.lease is not None:
            self.lease.release()
