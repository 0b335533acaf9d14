"""Factory of servers that sends orders to the starter process.

Invariant: a starter process that has ended or does not begin an order is replaced. The supervisors that it has forked
continue.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from coldstart.contract import environment
from coldstart.contract.weights import PacedFetch
from coldstart.errors import UsageError
from coldstart.host.launches import Launch
from coldstart.host.live.servers import ModelServer
from coldstart.host.live.starter import StartOrder
from coldstart.system.ipc import json_lines
from coldstart.system.paths import Cache
from coldstart.system.proc import scratch

# Interval in seconds at which the starter process is checked.
CHECK_S = 1.0
# Time in seconds in which it must begin an order: at the first one it still imports modules, on a busy machine.
BEGIN_S = 30.0
# Time in seconds after which a process that has ended is restarted before an order needs it.
RESTART_S = 5.0


class Starter:
    """Factory of servers that uses the starter process, and restarts it if it died."""

    module = "coldstart.host.live.starter"

    def __init__(
        self,
        directory: Path,
        cache: Cache,
        *,
        offline: bool,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.env = os.environ if env is None else env
        self.directory, self.cache, self.offline = directory, cache, offline
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: json_lines.Channel | None = None
        self._number = 0
        self._living: set[ModelServer] = set()
        self._began_s = 0.0
        self._checks: asyncio.TimerHandle | None = None

    def warm(self) -> None:
        """Start the starter process, so that its imports are done before the first start; restart it if it has ended."""
        if self._checks is None:
            self._checks = asyncio.get_running_loop().call_later(CHECK_S, self._check)
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
        self._channel, self._began_s = json_lines.Channel(ours), asyncio.get_running_loop().time()

    def _check(self) -> None:
        """Replace the process if it is late, and restart it if it has ended."""
        loop = asyncio.get_running_loop()
        self._checks = loop.call_later(CHECK_S, self._check)
        due = loop.time() - BEGIN_S
        is_late = any(not one.is_begun and one.ordered_s < due for one in self._living)
        if self._process is not None and is_late:
            self._process.kill()
            loop.run_in_executor(None, self._process.wait)
            self._process = None
        if loop.time() - self._began_s > RESTART_S:
            with suppress(OSError):  # no memory or descriptor: the next check tries again
                self.warm()

    def begin(
        self,
        launch: Launch,
        deadline_s: float,
        listen: Sequence[str] = (),
        env: Mapping[str, str] = MappingProxyType({}),
        pace: PacedFetch | None = None,
        *,
        template: str | None = None,
    ) -> ModelServer:
        """Start a server, or a template of this level for the servers that are begun here; returns at once.

        The arguments are those of StartOrder. Without `listen` the server listens at its socket.

        Raises:
            OSError: The order cannot be sent.
        """
        self._number += 1
        path = self.directory / f"{self._number}.sock"
        log = self.directory / f"{self._number}.log"
        order = StartOrder(
            launch,
            deadline_s,
            str(self.cache.root),
            str(self.directory / "templates"),
            self.offline,
            tuple(listen or ("--uds", str(path))),
            dict(env),
            pace,
            template,
        )
        with log.open("ab") as file:
            ours, theirs = socket.socketpair()
            with theirs:
                # If this fails, closing `theirs` ends the lease at once.
                self._order(order.encode(), (theirs.fileno(), file.fileno()))
        server = ModelServer(path, log, ours)
        self._living.add(server)
        server.ended.add_done_callback(lambda _: self._living.discard(server))
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
        """Wait until every server and the starter process have ended; no server may be begun afterwards."""
        while self._living:
            await asyncio.wait([one.ended for one in self._living])
        if self._checks is not None:
            self._checks.cancel()
        if self._process is not None and self._channel is not None:
            self._channel.close()
            # No supervisor depends on it, and a stopped process would not notice the end of its connection.
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        with suppress(OSError, UsageError):  # what killed supervisors have left
            await asyncio.to_thread(scratch.sweep)
