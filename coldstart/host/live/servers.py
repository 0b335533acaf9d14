"""Start and monitor the server processes of a gateway, each over its lease, which is a connection to its supervisor.

The lease closes when the server exits, whatever the reason. It also closes if the server was never started, because the
starter process was killed or replaced. The socket and log of a server are deleted when it exits.

Invariant: a starter process that has exited, or that does not start an order in time, is replaced. The supervisors that it
forked continue.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coldstart.artifacts import files
from coldstart.contract import environment
from coldstart.errors import UsageError
from coldstart.host.events import Failure
from coldstart.host.live.server_log import ServerLog
from coldstart.host.live.starter import StartOrder
from coldstart.host.live.upstream import Upstream
from coldstart.launch.modes import PARKED_ENGINE, STANDBY
from coldstart.system import paths
from coldstart.system.ipc import json_lines
from coldstart.system.ipc.peers import PeerError
from coldstart.system.paths import Cache
from coldstart.system.proc import exits, scratch
from coldstart.system.proc.tree import ProcessTree
from coldstart.system.start_progress import KEY, StartProgress
from coldstart.system.timeline import Span, Timeline


class StartFailedError(Exception):
    """The server did not become ready. `failure` is the cause."""

    def __init__(self, reason: str, hint: str = "", code: str = "") -> None:
        self.failure = Failure(reason, hint, code)
        super().__init__(str(self.failure))


@dataclass(frozen=True, slots=True)
class ReadyServer:
    """A ready server: its start mode, its PID (None if there is no process to measure), and the content of its ready file."""

    mode: str
    pid: int | None
    document: Mapping[str, Any]

    def add_template_wait(self, waited_s: float) -> ReadyServer:
        """Return a copy with an additional first phase, during which the start waited `waited_s` seconds for its template."""
        wait = Timeline([Span("wait for the template", 0.0, waited_s, "host")])
        spans = [
            {**span, "start_s": span["start_s"] + waited_s, "end_s": span["end_s"] + waited_s}
            for span in self.document.get("spans", ())
        ]
        phases = wait.sum_phases() | self.document.get("phases", {})
        document = {**self.document, "phases": phases, "spans": wait.describe_spans() + spans}
        return replace(self, document=document)


# Interval in seconds at which the size of a server's log is checked.
LOOK_AT_LOG_S = 10.0


class ModelServer:
    """A server or template process, from its start order to its exit, monitored over the connection `lease` to its supervisor.

    The future `ready` raises StartFailedError if the start fails. The future `ended` resolves to the reason for the exit
    after the server's files have been deleted. `was_killed` is then True if another program killed the server with
    SIGKILL. `progress` is the last progress that the start reported, or None before the first report and after the start.
    The server listens on `socket` unless its order sets another address.
    """

    def __init__(self, path: Path, log: Path, lease: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self.socket, self.log = path, ServerLog(log)
        self.ready: asyncio.Future[ReadyServer] = loop.create_future()
        self.ended: asyncio.Future[str] = loop.create_future()
        self.ordered_s = loop.time()
        self.is_begun = self.was_killed = False
        self.progress: StartProgress | None = None
        # Mark the exception as retrieved, because a caller may use only one of the two futures.
        self.ready.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._loop, self._reason, self._failure, self._is_final = loop, "", Failure(""), False
        self._trees: list[ProcessTree] = []
        self._kernel_kills = exits.count_oom_kills()
        lease.setblocking(False)
        self._channel = json_lines.Channel(lease)
        loop.add_reader(lease, self._receive)
        self._looks = loop.call_later(LOOK_AT_LOG_S, self._look)

    def stop(self) -> None:
        """Ask the server to exit. A second call stops it by force."""
        self._signal(signal.SIGTERM)

    def retire(self) -> None:
        """Retire a template, which then exits after all processes forked from it."""
        self._signal(signal.SIGUSR1)

    def kill(self) -> None:
        """Kill the server and its supervisor, even if they are suspended or do not respond."""
        for tree in self._trees:
            tree.kill()
        if not self.is_begun and not self.ended.done():
            self._close()

    def is_stopped(self) -> bool:
        """Return whether a signal has suspended any process of the server (state T). This call blocks."""
        return any(tree.is_stopped() for tree in self._trees)

    def _signal(self, number: int) -> None:
        if not self.ended.done():
            self._channel.try_send({"signal": int(number)})

    def _look(self) -> None:
        self._loop.run_in_executor(None, self.log.truncate)
        self._looks = self._loop.call_later(LOOK_AT_LOG_S, self._look)

    def _receive(self) -> None:
        try:
            messages = self._channel.receive(None)
        except PeerError as error:
            self._reason, messages = str(error), None
        if messages is None:
            self._close()
            return
        for message in messages:
            self._process_message(message)

    def _process_message(self, message: Mapping[str, Any]) -> None:
        self.is_begun = True
        if "process" in message:
            self._trees.append(ProcessTree(int(message["process"])))
        elif KEY in message:
            self.progress = StartProgress.parse(message[KEY])
        elif "ready" in message and not self.ready.done():
            document = message["ready"]
            ready = ReadyServer(document["mode"], document["pid"], document)
            # A woken engine goes back to sleep after its server exits, so its process must not be killed.
            if ready.pid is not None and ready.mode not in (STANDBY.name, PARKED_ENGINE.name):
                self._trees.append(ProcessTree(ready.pid))
            self.progress = None
            self.ready.set_result(ready)
        elif "failed" in message:
            self._failure = Failure(**message["failed"])
            self._reason = self._failure.message
            self.was_killed, self._is_final = bool(message.get("killed")), bool(message.get("final"))
        elif "code" in message:
            self._reason = f"the server {exits.describe_exit(message['code'])}"
            self.was_killed = exits.is_killed(message["code"])
        elif "exit" in message:
            self._reason = self._reason or f"the server exited with code {message['exit']}"

    def _close(self) -> None:
        self._loop.remove_reader(self._channel.socket)
        self._channel.close()
        self._looks.cancel()
        if not self._reason:
            died = "supervisor" if self.is_begun else "starter process"
            self._reason, self.was_killed = f"the server's {died} was killed", True
            # Without its supervisor, which kills the session, a suspended process would remain.
            for tree in self._trees:
                tree.kill()
        if self.was_killed and exits.count_oom_kills() > self._kernel_kills:
            self.was_killed = False
            self._reason = f"{self._reason}: the kernel killed a process because memory was exhausted"
        if not self.ready.done():
            cause = "" if self._is_final else self.log.find_error()
            reason = f"{self._reason}: {cause}" if cause and cause not in self._reason else self._reason
            self.ready.set_exception(StartFailedError(reason, self._failure.hint, self._failure.code))
        self.socket.unlink(missing_ok=True)
        self.log.remove()
        self.ended.set_result(self._reason)


# Seconds after which a server that was asked to exit is stopped by force.
PATIENCE_S = 20.0
# Seconds that its supervisor has to stop it by force before all its processes are killed.
FORCE_S = 5.0


async def stop_by_force(server: ModelServer) -> None:
    """Ask a server to stop and wait until it exits. Kill it if it does not exit in time."""
    for ask, wait_s in ((server.stop, PATIENCE_S), (server.stop, FORCE_S), (server.kill, None)):
        ask()
        if (await asyncio.wait([server.ended], timeout=wait_s))[0]:
            return


# Number of checks during the timeout after which a server counts as hung.
CHECKS_PER_TIMEOUT = 4


async def await_hang(
    server: ModelServer, place: Path | tuple[str, int] | None, timeout_s: Callable[[], float]
) -> str:
    """Wait until the server hangs, and return the reason. `place` is the address of its API server, or None if it has none.

    A server hangs if every check during `timeout_s()` seconds finds the same fault: a signal has suspended one of its
    processes, or its API server, once ready, does not answer GET /health.
    """
    probe = Upstream(place) if place is not None else None
    before, failed = "", 0
    try:
        while failed <= CHECKS_PER_TIMEOUT:
            interval_s = timeout_s() / CHECKS_PER_TIMEOUT
            _, fault = await asyncio.gather(asyncio.sleep(interval_s), _find_fault(server, probe, interval_s))
            failed = failed + 1 if fault and fault == before else int(bool(fault))
            before = fault
    finally:
        if probe is not None:
            probe.close()
    return f"{before} for {timeout_s():g} s"


async def _find_fault(server: ModelServer, probe: Upstream | None, limit_s: float) -> str:
    if await asyncio.to_thread(server.is_stopped):
        return "a process of the server was suspended by a signal"
    if probe is None or not server.ready.done():
        return ""
    with suppress(OSError):  # includes TimeoutError
        async with asyncio.timeout(limit_s), await probe.request("GET", "/health") as answer:
            await answer.read()
            return ""
    return "the API server did not respond"


# Interval in seconds between checks of the starter process.
CHECK_S = 1.0
# Seconds within which the starter process must begin an order. The first order also waits for its imports.
BEGIN_S = 30.0
# Minimum time in seconds between the starts of two starter processes, unless an order needs one.
RESTART_S = 5.0


class ServerStarter:
    """Factory of model servers. It delegates each start to a starter process, and replaces this process if it exits."""

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

    def start_process(self) -> None:
        """Start the starter process if it is not running, so that it has imported all modules before the first order."""
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
                # Only the gateway handles Ctrl-C at the terminal; it then stops the servers.
                start_new_session=True,
            )
        self._channel, self._began_s = json_lines.Channel(ours), asyncio.get_running_loop().time()

    def _check(self) -> None:
        """Replace the starter process if it does not begin an order in time, and restart it if it has exited."""
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
                self.start_process()

    def order_start(self, order: StartOrder) -> ModelServer:
        """Order the start of a server, or of a template from which servers are forked, without waiting for the start.

        Raises:
            OSError: The order cannot be sent.
        """
        self._number += 1
        path = self.directory / f"{self._number}.sock"
        log = self.directory / f"{self._number}.log"
        order = replace(
            order,
            listen=order.listen or ("--uds", str(path)),
            cache=str(self.cache.root),
            templates=str(self.directory / "templates"),
            offline=self.offline,
        )
        with log.open("ab") as file:
            ours, theirs = socket.socketpair()
            with theirs:
                # If sending fails, closing `theirs` ends the lease immediately.
                self._send(order.encode(), (theirs.fileno(), file.fileno()))
        server = ModelServer(path, log, ours)
        self._living.add(server)
        server.ended.add_done_callback(lambda _: self._living.discard(server))
        return server

    def _send(self, message: Mapping[str, Any], descriptors: tuple[int, ...]) -> None:
        for _ in range(2):
            with suppress(OSError):
                self.start_process()
                assert self._channel is not None
                self._channel.send(message, descriptors)
                return
            self._process = None

    async def close(self) -> None:
        """Wait until every server and the starter process have exited. No server may be started after this call."""
        while self._living:
            await asyncio.wait([one.ended for one in self._living])
        if self._checks is not None:
            self._checks.cancel()
        if self._process is not None and self._channel is not None:
            self._channel.close()
            # No supervisor depends on the starter process. If suspended, it would not see that the connection closed.
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        with suppress(OSError, UsageError):  # directories of killed supervisors
            await asyncio.to_thread(scratch.remove_dead_directories)


def create_host_directory() -> AbstractContextManager[Path]:
    """Return a context manager that creates a directory for sockets and logs, and deletes the directories of killed hosts.

    Raises OSError if the directory cannot be created.
    """
    # The socket of a server has the longest path in the base directory.
    base = paths.runtime_dir(len("/host-12345678/99999.sock"))
    return files.create_owned_directory(base, "host-")
