"""Interface between the HTTP application and its decision maker: the driver of a host, or the front of a fleet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from coldstart.host.launches import Catalogue
from coldstart.host.live.log import Log
from coldstart.host.live.metrics import Metrics
from coldstart.host.live.tickets import Ticket
from coldstart.host.live.upstream import Replica
from coldstart.host.progress import Progress
from coldstart.host.status import HostFacts


class Front(Protocol):
    """Admits requests and decides which server answers each."""

    catalogue: Catalogue
    facts: HostFacts
    log: Log

    @property
    def resumes(self) -> bool:
        """Return whether a stream whose server ended can go on at another server."""

    @property
    def metrics(self) -> Metrics:
        """Return the metrics of the requests."""

    def enter(self, asked: str | None) -> Ticket:
        """Admit a request for the model name `asked`, which may be None. Raises AdmissionRefusedError."""

    def leave(self, ticket: Ticket) -> None:
        """Forget a request that was answered, or whose client disconnected."""

    async def readmit(self, ticket: Ticket, replica: Replica, error: Exception) -> Ticket | None:
        """Admit a request again after its server failed, if its answer had not begun or its stream can continue elsewhere.

        Returns None if no other server can answer it.
        """

    def progress(self, model: str) -> Progress:
        """Return the progress of the model's start, for a waiting client."""

    def status(self) -> Mapping[str, object]:
        """Return the document of GET /status."""
