"""The interface of a start mode: whether it can be used, and how it starts a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from coldstart.launch import server_process, supervise
from coldstart.launch.server_process import Running, ServerProcess

if TYPE_CHECKING:
    from coldstart.launch.request import ServerStart
    from coldstart.launch.ttft import StartCosts


@dataclass(frozen=True)
class Reason:
    """Why a mode cannot be used, and a hint that the user can type."""

    reason: str
    hint: str


class LaunchRefusedError(RuntimeError):
    """A mode that exists for this start did not start the server; the message says why."""

    def __init__(self, reason: str, hint: str | None = None) -> None:
        super().__init__(reason)
        self.hint = hint


class StartMode(Protocol):
    """One way of starting a server. To add one, write a file in this package and add its object to `LADDER`."""

    @property
    def name(self) -> str:
        """The value of `--mode`."""

    @property
    def loads_weights(self) -> bool:
        """Whether the server loads its weights itself, so that fetching them early helps."""

    @property
    def repeatable(self) -> bool:
        """Whether one preparation starts any number of servers: what a host and a benchmark need."""

    @property
    def probes(self) -> tuple[str, ...]:
        """Names of the doctor's probes that must be ok."""

    def unavailable(self, start: ServerStart | None = None) -> Reason | None:
        """Return why this machine and vLLM build, with `start` also its bundle and templates, lack this mode; else None.

        Raises LaunchRefusedError where that cannot be found out.
        """

    def launch(self, start: ServerStart) -> Running:
        """Start the server and wait until it is ready.

        Raises LaunchRefusedError, PeerError or BundleError where this mode cannot be used now, Died when the server ends first.
        """

    def remaining(self, costs: StartCosts) -> StartCosts | None:
        """Return the part of a fresh start's `costs` that is left in this mode, None where it is not predicted."""


def await_ready(start: ServerStart, launched: tuple[ServerProcess, int]) -> Running:
    """Wait until the launched server is ready; end it if this is interrupted. Raises Died, CommandFailedError."""
    process, reader = launched
    with supervise.end_on_error(process):
        return server_process.acknowledged(process, reader, start.began, start.request.ready_timeout)
