"""Daemon side of one client connection: its lease, its rate limit, and its unsent messages."""

from __future__ import annotations

import os
import socket
from typing import Any

from coldstart.system.ipc.json_lines import Channel, encode, send_some
from coldstart.weights.prefetch.model import PrefetchedModel
from coldstart.weights.prefetch.paces import FetchPace
from coldstart.weights.prefetch.schedule import Lease, UnitEntry, UnitState

# Drop a client that does not read its messages before they fill the daemon's memory.
_MAX_UNSENT = 16 << 20


class ClientConnection:
    """Connection of one client; it never blocks, and `gone` is True when it must be dropped."""

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
    def has_unsent(self) -> bool:
        """Return whether unsent messages wait for the socket to accept more bytes."""
        return bool(self._unsent)

    def say(self, message: dict[str, Any], descriptor: int | None = None) -> None:
        """Send a message and a descriptor, which is closed after it is sent."""
        if descriptor is not None:
            self._descriptor = descriptor
        self._unsent += encode(message)
        self.flush()
        self.gone = self.gone or len(self._unsent) > _MAX_UNSENT

    def flush(self) -> None:
        """Send as many bytes as the socket accepts now."""
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
        """Report the ready units, and the failed units with their reasons."""
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
        """Close the connection and release its lease."""
        self._close_descriptor()
        self.channel.close()
        if self.lease is not None:
            self.lease.release()
