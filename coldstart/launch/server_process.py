"""Bringing one server process up, by any of the start modes, and holding on to it.

Every mode yields a Running server that has acknowledged itself: it listens and one real token came back. Readiness is
a line on a pipe, never a sleep or a poll. The server ends with its Running handle, however that ends.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from coldstart.contract.plan import READY_FD_ENV, LaunchPlan
from coldstart.errors import CommandFailedError
from coldstart.system import timeline
from coldstart.system.ipc import json_lines, peers
from coldstart.system.proc import processes
from coldstart.system.proc.lifeline import SUPERVISOR_ENV


class ServerProcess(Protocol):
    """A server process, whoever its parent is."""

    pid: int

    def poll(self) -> int | None:
        """Its exit code (128 + n after signal n), or None while it runs."""

    def wait(self) -> int:
        """Block until it has ended; its exit code."""

    def signal(self, number: int) -> None:
        """Pass SIGTERM, SIGINT or SIGKILL on."""

    def fileno(self) -> int:
        """A descriptor that becomes readable when it ends."""


class ServerExitedError(CommandFailedError):
    """The server ended before it was ready."""


@dataclass
class Running:
    """A server that has acknowledged itself. `report` is its own account: fast_path, fallbacks, tokens, canary."""

    process: ServerProcess
    report: Mapping[str, Any]
    ready_s: float


class Guardian(Protocol):
    """Whoever holds the namespaces of a thawed template."""

    pid: int

    def end(self) -> None:
        """End the template and all that lives in its namespaces, and leave nothing behind."""


class Child:
    """A server that is our own child."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process, self.pid = process, process.pid
        self._pidfd = os.pidfd_open(process.pid)

    def fileno(self) -> int:
        """The process's pidfd."""
        return self._pidfd

    def poll(self) -> int | None:
        """As ServerProcess."""
        return _exit_code(self.process.poll())

    def wait(self) -> int:
        """As ServerProcess; what is left of its session (worker processes of vLLM's own executors) ends with it."""
        if self.process.returncode is None:
            select.select([self._pidfd], [], [])
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # not yet reaped: the number is still its own
        return _exit_code(self.process.wait()) or 0

    def signal(self, number: int) -> None:
        """As ServerProcess."""
        self.process.send_signal(number)


class Leased:
    """A server forked by a template; the connection is its lease."""

    def __init__(self, connection: json_lines.Channel, guardian: Guardian | None) -> None:
        self.connection, self.guardian = connection, guardian
        self._replies = connection.replies()
        self._code: int | None = None
        answer = next(self._replies, {})
        if "pid" not in answer:
            raise peers.PeerError(answer.get("error", "the template closed the connection"))
        self.pid = _pid_here(int(answer["pid"]), guardian)

    def fileno(self) -> int:
        """The connection."""
        return self.connection.fileno()

    def poll(self) -> int | None:
        """As ServerProcess."""
        ready, _, _ = select.select([self.connection], [], [], 0) if self._code is None else ([], [], [])
        return self.wait() if ready else self._code

    def wait(self) -> int:
        """As ServerProcess; a template that went away without a word counts as the server's death (1)."""
        if self._code is None:
            self._code = next((_exit_code(int(m["exit"])) or 0 for m in self._replies if "exit" in m), 1)
            if self.guardian is not None:
                self.guardian.end()
        return self._code

    def signal(self, number: int) -> None:
        """As ServerProcess; a server that has ended already takes no more signals."""
        with suppress(OSError):
            self.connection.send({"signal": int(number)})


def _pid_here(pid: int, guardian: Guardian | None) -> int:
    if guardian is None:
        return pid
    try:
        return processes.outer_pid(guardian.pid, pid)
    except OSError as error:
        raise peers.PeerError(f"the template forked a server that is gone already: {error}") from error


def _exit_code(code: int | None) -> int | None:
    return code if code is None or code >= 0 else 128 - code


def fresh(plan: LaunchPlan, output: IO[bytes] | None = None) -> tuple[ServerProcess, int]:
    """Start a server from nothing; the process and the descriptor on which it will acknowledge.

    Its log goes to `output`, by default to our own standard error.
    """
    reader, writer = os.pipe()
    variables: dict[str, str] = {READY_FD_ENV: str(writer), SUPERVISOR_ENV: str(os.getpid())}
    environment = os.environ | variables | plan.env
    sink = output or sys.stderr
    # The plan is a file without a name, so that no end of either process leaves it behind.
    with tempfile.TemporaryFile("w") as file:
        json.dump(plan.document(), file)
        file.flush()
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "coldstart.vllm.engine.server", f"/proc/self/fd/{file.fileno()}"],
            env=environment,
            pass_fds=(writer, file.fileno()),
            # Its own session: a Ctrl-C at the terminal reaches the server through us, once.
            start_new_session=True,
            stdout=sink,
            stderr=sink,
        )
    os.close(writer)
    return Child(process), reader


def forked(
    plan: LaunchPlan,
    socket_path: Path,
    guardian: Guardian | None = None,
    *,
    judge: Callable[[], None] = lambda: None,
) -> tuple[ServerProcess, int]:
    """Have a template fork the server; `guardian` holds the namespaces of a thawed one, and ends with the server.

    `judge` is called while the template forks. The server begins when it has returned; where it raises, never.
    Raises what it raises, and peers.PeerError when no template answers.
    """
    connection = json_lines.Channel(peers.connect(socket_path))
    reader, writer = os.pipe()
    leave, give_leave = os.pipe()
    request = {
        "plan": plan.document(),
        "cwd": str(Path.cwd()),
        "env": dict(os.environ),
        "now": timeline.now(),
    }
    try:
        connection.send(request, (0, 2, 2, writer, leave))
        judge()
        leased = Leased(connection, guardian)
        os.write(give_leave, b"1")
        return leased, reader
    except BaseException as error:
        connection.close()
        os.close(reader)
        if isinstance(error, OSError):
            raise peers.PeerError(f"the template does not take the request: {error.strerror}") from error
        raise
    finally:
        for descriptor in (writer, leave, give_leave):
            os.close(descriptor)


def acknowledged(process: ServerProcess, reader: int, since: float, timeout: float | None) -> Running:
    """Wait until the server has acknowledged itself; `since` is CLOCK_MONOTONIC at its start.

    Raises Died when it ends first, CommandFailedError, after ending it, when `timeout` seconds pass.
    """
    try:
        return _acknowledged(process, reader, since, timeout)
    finally:
        os.close(reader)


def _acknowledged(process: ServerProcess, reader: int, since: float, timeout: float | None) -> Running:
    deadline = None if timeout is None else since + timeout
    line = b""
    while not line.endswith(b"\n"):
        left = None if deadline is None else max(0.0, deadline - timeline.now())
        ready, _, _ = select.select([reader], [], [], left)
        if not ready:
            process.signal(signal.SIGKILL)
            raise CommandFailedError(
                f"The server was not ready within {timeout:g} s and was ended.",
                hint="give it longer: --ready-timeout SECONDS",
            )
        chunk = os.read(reader, 65536)
        if not chunk:
            from coldstart.system import probes  # what else it imports, no start needs

            code = process.wait()
            raise ServerExitedError(
                f"The server ended with exit code {code} before it was ready; its log says why.",
                hint=probes.exhausted(),
            )
        line += chunk
    report = json.loads(line)
    if reason := report.get("unfit"):
        process.wait()
        raise ServerExitedError(f"what was built before is for something else: {reason}")
    return Running(process, report, timeline.now() - since)
