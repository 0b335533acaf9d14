"""What the endpoint needs of whoever decides behind it: a host's driver, or a fleet's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from coldstart.gateway.log import Log
from coldstart.gateway.metrics import Metrics
from coldstart.gateway.tickets import Ticket
from coldstart.gateway.upstream import Replica
from coldstart.host.launches import Catalogue
from coldstart.host.status import HostFacts


class Front(Protocol):
    """Takes requests in and says where each goes."""

    catalogue: Catalogue
    facts: HostFacts
    log: Log

    @property
    def resumes(self) -> bool:
        """Whether a stream whose server went can go on at another one."""

    @property
    def metrics(self) -> Metrics:
        """What is counted."""

    def enter(self, asked: str | None) -> Ticket:
        """Take a request in. Raises AdmissionRefused."""

    def leave(self, ticket: Ticket) -> None:
        """The request was answered, or its client went."""

    async def again(self, ticket: Ticket, replica: Replica, error: Exception) -> Ticket | None:
        """A request whose server broke off, before it said anything or in a stream that can go on elsewhere, taken in anew.

        None where nobody else can answer it.
        """

    def state(self, model: str) -> str:
        """In a word, for a client that waits."""

    def status(self) -> Mapping[str, object]:
        """The document of GET /status."""
