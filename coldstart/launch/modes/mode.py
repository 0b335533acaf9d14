"""Interface of a start mode: availability and launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from coldstart.launch.request import ServerStart
    from coldstart.launch.server_process import Running, ServerProcess


@dataclass(frozen=True)
class Reason:
    """Reason why a mode cannot be used, and a hint that the user can type."""

    reason: str
    hint: str


class LaunchRefusedError(RuntimeError):
    """An available mode did not start the server; the message has the reason."""

    def __init__(self, reason: str, hint: str | None = None) -> None:
        super().__init__(reason)
        self.hint = hint


class StartMode(Protocol):
    """One way to start a server. To add a mode, write a file in this package and add its object to `LADDER`."""

    @property
    def name(self) -> str:
        """Return the value of `--mode`."""

    @property
    def loads_weights(self) -> bool:
        """Return whether the server loads its weights itself, so that an early fetch helps."""

    @property
    def repeatable(self) -> bool:
        """Return whether one preparation starts any number of servers, which a host and a benchmark need."""

    @property
    def probes(self) -> tuple[str, ...]:
        """Return the names of the doctor's probes that must be ok."""

    def unavailable(self, start: ServerStart | None = None) -> Reason | None:
        """Return why this machine or vLLM build lacks this mode, None if it is available.

        With `start`, the bundle and the templates of that start count too.

        Raises:
            LaunchRefusedError: The availability cannot be determined.
        """

    def launch(self, start: ServerStart) -> Running:
        """Start the server and wait until it is ready.

        Raises:
            LaunchRefusedError, PeerError, BundleError: This mode cannot be used now.
            ServerExitedError: The server exits before it is ready.
            CommandFailedError: The server is not ready in time.
        """


def await_ready(start: ServerStart, launched: tuple[ServerProcess, int]) -> Running:
    """Wait until the launched server is ready. End the server on any exception.

    Raises:
        ServerExitedError: The server exits before it is ready.
        CommandFailedError: The server is not ready in time.
    """
    # A command imports the modes for their names: what only a start needs is imported there.
    from coldstart.launch import server_process, supervise

    process, reader = launched
    with supervise.end_on_error(process):
        start.request.observe(process.pid)
        request = start.request
        return server_process.acknowledged(
            process, reader, start.began, request.ready_timeout, request.on_progress
        )
