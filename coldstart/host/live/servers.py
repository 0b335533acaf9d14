"""Server processes as futures of the gateway's event loop; each server has its own unix socket.

Invariant: no function here blocks the loop. The end of a server's lease reports its end, so no signal can reach
another process with a reused PID. The socket and log of a server are deleted when it ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from coldstart.contract import environment
from coldstart.contract.weights import PacedFetch
from coldstart.errors import UsageError
from coldstart.host.launches import Launch
from coldstart.host.live.server_log import ServerLog
from coldstart.system.ipc import json_lines
from coldstart.system.ipc.peers import PeerError
from coldstart.system.paths import Cache

_LONGEST_SOCKET = 107
# Interval in seconds at which the size of a server's log is checked.
LOOK_AT_LOG_S = 10.0


class StartFailedError(Exception):
    """The server did not become ready; the message is for the clients that requested its model."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Facts about a ready server: `document` is its ready file; `pid` is 0 without a process to measure."""

    mode: str
    pid: int
    document: Mapping[str, Any]


class ModelServer(Protocol):
    """One server, from its start order to its end.

    `ready` raises StartFailedError. `ended` returns how the server ended, after its files are deleted.
    """

    socket: Path
    log: ServerLog
    ready: asyncio.Future[Ready]
    ended: asyncio.Future[str]

    def stop(self) -> None:
        """Ask the server to end; a second call ends it at once. Does nothing after its end."""

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


class Supervised:
    """Server process that is observed over its lease."""

    def __init__(self, path: Path, log: Path, lease: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self.socket, self.log = path, ServerLog(log)
        self.ready: asyncio.Future[Ready] = loop.create_future()
        self.ended: asyncio.Future[str] = loop.create_future()
        # Mark the exception as retrieved: a caller may use only one of the two futures.
        self.ready.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._channel, self._loop, self._reason = json_lines.Channel(lease), loop, ""
        lease.setblocking(False)
        loop.add_reader(lease, self._heard)
        self._looks = loop.call_later(LOOK_AT_LOG_S, self._look)

    def stop(self) -> None:
        """Ask the server to end; a second call ends it at once."""
        self._signal(signal.SIGTERM)

    def retire(self) -> None:
        """Retire a template."""
        self._signal(signal.SIGUSR1)

    def _signal(self, number: int) -> None:
        if not self.ended.done():
            with suppress(OSError):
                self._channel.send({"signal": int(number)})

    def _look(self) -> None:
        self._loop.run_in_executor(None, self.log.bound)
        self._looks = self._loop.call_later(LOOK_AT_LOG_S, self._look)

    def _heard(self) -> None:
        try:
            messages = self._channel.receive(None)
        except PeerError as error:
            self._reason, messages = str(error), None
        if messages is None:
            self._close()
            return
        for message in messages:
            self._take(message)

    def _take(self, message: Mapping[str, Any]) -> None:
        if "ready" in message and not self.ready.done():
            document = message["ready"]
            self.ready.set_result(Ready(document["mode"], int(document["pid"]), document))
        elif "failed" in message:
            self._reason = str(message["failed"])
        elif "exit" in message:
            self._reason = self._reason or f"the server ended with exit code {message['exit']}"

    def _close(self) -> None:
        self._loop.remove_reader(self._channel.socket)
        self._channel.close()
        self._looks.cancel()
        reason = self._reason or "the server's supervisor was killed"
        if not self.ready.done():
            cause = self.log.find_error()
            self.ready.set_exception(StartFailedError(f"{reason}: {cause}" if cause else reason))
        self.socket.unlink(missing_ok=True)
        self.log.remove()
        self.ended.set_result(reason)


class Starter:
    """Factory of servers that uses the starter process, and restarts it if it died."""

    module = "coldstart.host.live.starter"

    def __init__(
        self, directory: Path, cache: Cache, *, offline: bool, env: Mapping[str, str] | None = None
    ) -> None:
        self.env = os.environ if env is None else env
        self.directory, self.cache, self.offline = directory, cache, offline
        if len(str(directory / "99999.sock")) > _LONGEST_SOCKET:
            raise UsageError(
                f"the path {directory} is too long for a unix socket",
                hint="set XDG_RUNTIME_DIR to a shorter path",
            )
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: json_lines.Channel | None = None
        self._number = 0
        self._living: set[asyncio.Future[str]] = set()

    def warm(self) -> None:
        """Start the starter process, so that its imports are done before the first start."""
        if self._process is not None and self._process.poll() is None:
            return
        if self._channel is not None:
            self._channel.close()
        ours, theirs = socket.socketpair()
        supervisor = {str(environment.SUPERVISOR_PID): str(os.getpid())}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", self.module, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                env={**self.env, **supervisor},
                stdin=subprocess.DEVNULL,
                # Only the gateway handles Ctrl-C at the terminal; it then ends the servers.
                start_new_session=True,
            )
        self._channel = json_lines.Channel(ours)

    def begin(
        self,
        launch: Launch,
        deadline_s: float,
        listen: Sequence[str] = (),
        env: Mapping[str, str] = MappingProxyType({}),
        pace: PacedFetch | None = None,
    ) -> ModelServer:
        """Start a server (Servers)."""
        return self._begin(launch, deadline_s, None, listen, env, pace)

    def begin_template(self, launch: Launch, level: str, deadline_s: float) -> ModelServer:
        """Start a template (Servers)."""
        return self._begin(launch, deadline_s, level)

    def _begin(
        self,
        launch: Launch,
        deadline_s: float,
        level: str | None,
        listen: Sequence[str] = (),
        env: Mapping[str, str] = MappingProxyType({}),
        pace: PacedFetch | None = None,
    ) -> ModelServer:
        self._number += 1
        path = self.directory / f"{self._number}.sock"
        log = self.directory / f"{self._number}.log"
        message = {
            "model": launch.model,
            "args": list(launch.args),
            "served": launch.served_names,
            "mode": launch.mode,
            "on_miss": launch.on_miss,
            "revision": launch.revision,
            "untrusted": launch.untrusted,
            "cache": str(self.cache.root),
            "offline": self.offline,
            "environment": dict(env),
            "listen": list(listen or ("--uds", str(path))),
            "ready_timeout": deadline_s,
            "weights_from": launch.weights_from,
            "pace": None if pace is None else asdict(pace),
            "template": level,
            "templates": str(self.directory / "templates"),
        }
        with log.open("ab") as file:
            ours, theirs = socket.socketpair()
            server = Supervised(path, log, ours)
            self._living.add(server.ended)
            server.ended.add_done_callback(self._living.discard)
            with theirs:
                # If this fails, closing `theirs` ends the server at once, with a reason.
                self._order(message, (theirs.fileno(), file.fileno()))
        return server

    def _order(self, message: Mapping[str, Any], descriptors: tuple[int, ...]) -> None:
        for _ in range(2):
            with suppress(OSError):
                self.warm()
                assert self._channel is not None
                self._channel.send(message, descriptors)
                return
            self._process = None

    async def close(self) -> None:
        """Wait until every server and the starter process have ended."""
        while self._living:
            await asyncio.wait(self._living)
        if self._process is not None and self._channel is not None:
            self._channel.close()
            await asyncio.to_thread(self._process.wait)
