"""Interface of server processes as futures of the gateway's event loop; each server has its own unix socket."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from coldstart.contract.weights import PacedFetch
from coldstart.host.launches import Launch
from coldstart.host.live.server_log import ServerLog
from coldstart.system.start_progress import StartProgress
from coldstart.system.timeline import Span, Timeline


class StartFailedError(Exception):
    """The server did not become ready; the message is for the clients that requested its model."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Facts about a ready server: `document` is its ready file; `pid` is 0 without a process to measure."""

    mode: str
    pid: int
    document: Mapping[str, Any]

    def add_wait(self, waited_s: float) -> Ready:
        """Return these facts with a first span and phase: the start waited so long for its template."""
        wait = Timeline([Span("wait for the template", 0.0, waited_s, "host")])
        spans = [
            {**span, "start_s": span["start_s"] + waited_s, "end_s": span["end_s"] + waited_s}
            for span in self.document.get("spans", ())
        ]
        told = {
            "phases": wait.phases() | self.document.get("phases", {}),
            "spans": wait.describe_spans() + spans,
        }
        return replace(self, document={**self.document, **told})


class ModelServer(Protocol):
    """One server, from its start order to its end.

    `ready` raises StartFailedError. `ended` returns how the server ended, after its files are deleted; `was_killed`
    is then whether another program killed it with SIGKILL. `progress` is what it last reported about its start, None
    before that and once it is ready.
    """

    socket: Path
    log: ServerLog
    ready: asyncio.Future[Ready]
    ended: asyncio.Future[str]
    was_killed: bool
    progress: StartProgress | None

    def stop(self) -> None:
        """Stop the server gracefully; a second call kills it. No effect after it has exited."""

    def kill(self) -> None:
        """Kill its processes, also if they are stopped or do not answer."""

    def is_stopped(self) -> bool:
        """Return whether a signal has stopped one of its processes. Blocks."""

    def used_processor_s(self) -> float:
        """Return the CPU time in seconds that its engine has used since the last call. Blocks."""

    def retire(self) -> None:
        """Retire a template: fork no further process, and end after all forked processes."""


class Servers(Protocol):
    """Factory of server processes."""

    def begin(
        self,
        launch: Launch,
        deadline_s: float,
        listen: Sequence[str] = (),
        env: Mapping[str, str] = MappingProxyType({}),
        pace: PacedFetch | None = None,
    ) -> ModelServer:
        """Start a server; returns at once.

        The server listens at its socket, or as vLLM's arguments in `listen` define; `env` is added to its
        environment. `pace` limits the rate at which weights are fetched.

        Raises:
            OSError: The order cannot be sent.
        """

    def begin_template(self, launch: Launch, level: str, deadline_s: float) -> ModelServer:
        """Start a template of this level for the servers that are begun here; its `socket` is unused. See `begin`."""

    async def close(self) -> None:
        """Wait until every server has ended; no server may be begun afterwards."""
