"""Servers as the gateway's loop sees them: begun, ready or failed, ended; each behind a unix socket of its own.

Invariant: nothing here blocks the loop. A server's end is known by the end of its lease, so no pid is ever signalled that could
be another's; what it leaves (socket, log) goes with it.
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
# How often the size of a server's log is looked at.
LOOK_AT_LOG_S = 10.0


class StartFailedError(Exception):
    """The server did not become ready; the message is for those who asked for its model."""


@dataclass(frozen=True, slots=True)
class Ready:
    """How a server came up: `document` is its ready file. `pid` is the server's, 0 where there is no process to measure."""

    mode: str
    pid: int
    document: Mapping[str, Any]


class ModelServer(Protocol):
    """One server, from its order to its end. `ready` raises StartFailedError; `ended` gives how it ended, after all is gone."""

    socket: Path
    ready: asyncio.Future[Ready]
    ended: asyncio.Future[str]

    def stop(self) -> None:
        """Ask it to end; the second time, at once. Nothing happens when it has."""

    def retire(self) -> None:
        """Of a template: fork nothing more, and end when all that was forked has ended."""

    def tail(self, size: int) -> str:
        """The last `size` bytes of its log."""


class Servers(Protocol):
    """Whoever begins servers."""

    def begin(
        self,
        launch: Launch,
        deadline_s: float,
        listen: Sequence[str] = (),
        env: Mapping[str, str] = MappingProxyType({}),
        pace: PacedFetch | None = None,
    ) -> ModelServer:
        """Order a start; returns at once. It listens at its socket, or as vLLM's words in `listen` say; `env` is put on top.

        Weights that are fetched are fetched by `pace`.

        Raises OSError where not even that can be done.
        """

    def begin_template(self, launch: Launch, level: str, deadline_s: float) -> ModelServer:
        """Order a template of that level for the servers begun here; its `socket` is nobody's. As `begin`."""

    async def close(self) -> None:
        """Nothing is begun any more; every server has ended."""


class Supervised:
    """A server behind its lease."""

    def __init__(self, path: Path, log: Path, lease: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self.socket, self.log = path, ServerLog(log)
        self.ready: asyncio.Future[Ready] = loop.create_future()
        self.ended: asyncio.Future[str] = loop.create_future()
        # Somebody may look at only one of them.
        self.ready.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._channel, self._loop, self._reason = json_lines.Channel(lease), loop, ""
        lease.setblocking(False)
        loop.add_reader(lease, self._heard)
        self._looks = loop.call_later(LOOK_AT_LOG_S, self._look)

    def stop(self) -> None:
        """As ModelServer."""
        self._signal(signal.SIGTERM)

    def retire(self) -> None:
        """As ModelServer."""
        self._signal(signal.SIGUSR1)

    def tail(self, size: int) -> str:
        """As ModelServer."""
        return self.log.tail(size)

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
    """Servers by way of the starter process, which is started anew should it have died."""

    module = "coldstart.host.live.starter"

    def __init__(
        self, directory: Path, cache: Cache, *, offline: bool, env: Mapping[str, str] | None = None
    ) -> None:
        self.env = os.environ if env is None else env
        self.directory, self.cache, self.offline = directory, cache, offline
        if len(str(directory / "99999.sock")) > _LONGEST_SOCKET:
            raise UsageError(
                f"{directory} is too long a path for sockets", hint="set XDG_RUNTIME_DIR to a shorter one"
            )
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: json_lines.Channel | None = None
        self._number = 0
        self._living: set[asyncio.Future[str]] = set()

    def warm(self) -> None:
        """Have the starter process import what it needs, before anybody asks."""
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
                # A Ctrl-C at the terminal is the gateway's to hear; servers end when it says so.
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
        """As Servers."""
        return self._begin(launch, deadline_s, None, listen, env, pace)

    def begin_template(self, launch: Launch, level: str, deadline_s: float) -> ModelServer:
        """As Servers."""
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
                # Where this fails, closing `theirs` ends the server at once, with a reason.
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
        """As Servers; the starter has ended too."""
        while self._living:
            await asyncio.wait(self._living)
        if self._process is not None and self._channel is not None:
            self._channel.close()
            await asyncio.to_thread(self._process.wait)
