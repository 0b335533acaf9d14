"""Start one server process in any start mode, or another process of the engine package, and wait until it is ready.

Each start mode returns a ReadyServer, which is listening and has generated one token. The server reports readiness as a line
on a pipe, so waiting needs neither sleeps nor polling. The server exits when its supervising process or connection ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from coldstart.contract.environment import SUPERVISOR_PID
from coldstart.contract.plan import READY_FD_ENV, LaunchPlan
from coldstart.errors import CommandFailedError
from coldstart.system import start_progress, timeline
from coldstart.system.ipc import json_lines, peers
from coldstart.system.ipc.peers import await_readable
from coldstart.system.proc import exits, processes
from coldstart.vllm.engine.rejection import StartFailure

# Seconds within which a template must respond. Forking a large engine takes less than one second.
TEMPLATE_RESPONSE_S = 10.0
# Maximum delay in seconds before a signal is handled while waiting for readiness.
SIGNAL_CHECK_S = 0.5


class ServerProcess(Protocol):
    """A server process, which is a child of this process or was forked by a template."""

    pid: int

    def wait(self) -> int:
        """Wait until the process has exited, and return its exit code (128 + n after signal n)."""

    def signal(self, number: int) -> None:
        """Send SIGTERM, SIGINT or SIGKILL to the process."""

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the process exits."""


class ServerExitedError(CommandFailedError):
    """Error for a process that exited before it was ready, with its exit code (128 + n after signal n) and its failure."""

    code: int | None = None
    cause: StartFailure | None = None


class TemplateHungError(peers.PeerError):
    """Error for a template that accepted a connection but did not respond."""


@dataclass
class ReadyServer:
    """A ready server process, its readiness report (fast_path, fallbacks, tokens, canary) and its start time in seconds."""

    process: ServerProcess
    report: Mapping[str, Any]
    ready_s: float


class RestoredTemplate:
    """Template that CRIU has restored, with its directory and the process that holds its namespaces."""

    def __init__(self, directory: Path, process: subprocess.Popen[bytes], remove: Callable[[], None]) -> None:
        self.directory, self.process, self.pid, self._remove = directory, process, process.pid, remove

    @property
    def socket(self) -> Path:
        """Return the path on which the template listens."""
        return self.directory / "socket"

    def end(self) -> None:
        """Kill the template and all processes in its namespaces, and remove its directory."""
        inside = _pidfds(self.pid)
        if self.process.poll() is None:  # not yet reaped, so its PID is not reused
            # Kill the process group: CRIU may still be running, and processes that it forks now are in the group too.
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait()
        for pidfd in inside:  # the first process of a namespace exits last, and CRIU may write until then
            await_readable(pidfd)
            os.close(pidfd)
        self._remove()


def _pidfds(parent: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for child in processes.list_children(parent):
            with suppress(ProcessLookupError):
                found.append(os.pidfd_open(child))
    return found


class ChildServer:
    """A server process that is a child of this process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process, self.pid = process, process.pid
        self._pidfd = os.pidfd_open(process.pid)
        weakref.finalize(self, os.close, self._pidfd)

    def fileno(self) -> int:
        """Return the pidfd of the process."""
        return self._pidfd

    def wait(self) -> int:
        """Wait for the exit, then kill the rest of the session (vLLM's worker processes). Return the exit code."""
        if self.process.returncode is None:
            await_readable(self._pidfd)
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # not yet reaped, so its PID is not reused
        return exits.convert_return_code(self.process.wait())

    def signal(self, number: int) -> None:
        """Send a signal to the process, which must not be reaped: `wait` kills its session first."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)


class ForkedServer:
    """A server process that a template forked. It exits when the connection to the template closes."""

    def __init__(self, connection: json_lines.Channel, holder: RestoredTemplate | None) -> None:
        self.connection, self.holder = connection, holder
        self._replies = connection.iterate_replies()
        self._code: int | None = None
        if not await_readable(connection, timeout_s=TEMPLATE_RESPONSE_S):
            raise TemplateHungError(f"the template did not respond within {TEMPLATE_RESPONSE_S:g} s")
        answer = next(self._replies, {})
        if "pid" not in answer:
            raise peers.PeerError(answer.get("error", "the template closed the connection"))
        self.pid = int(answer["pid"])
        if holder is not None:
            try:
                self.pid = processes.find_outer_pid(holder.pid, self.pid)
            except OSError as error:
                raise peers.PeerError(f"the forked server has already exited: {error}") from error

    def fileno(self) -> int:
        """Return the descriptor of the connection."""
        return self.connection.fileno()

    def wait(self) -> int:
        """Wait for the exit and return the exit code, or 137 (SIGKILL) if the server was killed with its template."""
        if self._code is None:
            code = next((int(reply["exit"]) for reply in self._replies if "exit" in reply), -signal.SIGKILL)
            self._code = exits.convert_return_code(code)
            if self.holder is not None:
                self.holder.end()
        return self._code

    def signal(self, number: int) -> None:
        """Send a signal to the process. Do nothing if the template has disconnected."""
        self.connection.try_send({"signal": int(number)})


def spawn_engine_module(
    module: str,
    plan: LaunchPlan,
    list_arguments: Callable[[int, int], Sequence[str]],
    output: IO[Any] | int,
    *,
    env: Mapping[str, str],
    variable: str | None = None,
    **options: Any,
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a module of `coldstart.vllm.engine` in its own session, with a pipe on which it reports readiness.

    Because it has its own session, the process receives Ctrl-C only from this process, and only once.

    Args:
        module: Name of the module.
        plan: Launch plan. It is passed in an unnamed file, which does not outlive the two processes.
        list_arguments: Function that returns the module's arguments, given the descriptors of the plan file and the pipe.
        output: Destination of the process's output.
        env: Environment of the process.
        variable: Environment variable that also receives the descriptor of the pipe.
        options: Additional arguments for subprocess.Popen.

    Returns:
        The process, and the descriptor of the read end of the pipe.
    """
    reader, writer = os.pipe()
    with tempfile.TemporaryFile("w") as file:
        json.dump(plan.document(), file)
        file.flush()
        process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                f"coldstart.vllm.engine.{module}",
                *list_arguments(file.fileno(), writer),
            ],
            env={**env, variable: str(writer)} if variable else env,
            pass_fds=(writer, file.fileno()),
            start_new_session=True,
            stdout=output,
            stderr=output,
            **options,
        )
    os.close(writer)
    return process, reader


def start_fresh(plan: LaunchPlan, output: IO[bytes] | None = None) -> tuple[ServerProcess, int]:
    """Start a server in a new process. Its log goes to `output`, or to this process's standard error by default.

    Returns:
        The process, and the descriptor on which the server reports readiness.
    """
    process, reader = spawn_engine_module(
        "server",
        plan,
        lambda file, writer: [f"/proc/self/fd/{file}"],
        output or sys.stderr,
        env=os.environ | {str(SUPERVISOR_PID): str(os.getpid())} | plan.env,
        variable=READY_FD_ENV,
    )
    return ChildServer(process), reader


def fork_server(
    plan: LaunchPlan,
    socket_path: Path,
    holder: RestoredTemplate | None = None,
    *,
    check: Callable[[], None] = lambda: None,
) -> tuple[ServerProcess, int]:
    """Have a template fork a server process.

    Args:
        plan: Launch plan of the server.
        socket_path: Socket of the template.
        holder: Process that holds the namespaces of a restored template. It ends with the server.
        check: Called while the template forks. The server starts only after `check` returns, and never if it raises.

    Returns:
        The process, and the descriptor on which the server reports readiness.

    Raises:
        peers.PeerError: No template responds.
        Exception: Any error that `check` raises.
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
    # Arguments and variables can contain secrets. Only the server reads this memory file; the template does not.
    private = json_lines.create_sealed_memfd(json.dumps(request).encode())
    try:
        connection.send({}, (private, 0, 2, 2, writer, leave))
        check()
        leased = ForkedServer(connection, holder)
        os.write(give_leave, b"1")
        return leased, reader
    except BaseException as error:
        connection.close()
        os.close(reader)
        if isinstance(error, OSError):
            raise peers.PeerError(f"the template did not accept the request: {error.strerror}") from error
        raise
    finally:
        for descriptor in (writer, leave, give_leave, private):
            os.close(descriptor)


def await_readiness(
    process: ServerProcess,
    reader: int,
    since: float,
    timeout: float | None,
    on_progress: start_progress.Report = start_progress.ignore_progress,
    subject: str = "server",
) -> ReadyServer:
    """Wait until the process reports readiness. `since` is the time of its launch in seconds on CLOCK_MONOTONIC.

    `on_progress` is called with each progress report of the start. Errors call the process `subject`.

    Raises:
        ServerExitedError: The process exited before it was ready.
        CommandFailedError: The process was not ready after `timeout` seconds and was killed.
    """
    deadline = None if timeout is None else since + timeout
    lines, report = start_progress.LineReader(reader), None
    cause: StartFailure | None = None
    with os.fdopen(reader):
        while report is None:
            left = SIGNAL_CHECK_S if deadline is None else max(0.0, deadline - timeline.now())
            # Python runs the handler of a signal that arrives just before a system call only after the call returns.
            readable = await_readable(reader, process.fileno(), timeout_s=min(left, SIGNAL_CHECK_S))
            if not readable:
                if left >= SIGNAL_CHECK_S:
                    continue
                process.signal(signal.SIGKILL)
                raise CommandFailedError(
                    f"the {subject} was not ready within {timeout:g} s and was killed",
                    hint="allow more time with --ready-timeout SECONDS",
                )
            # Other processes can hold the pipe open after the exit.
            messages = lines.read() if reader in readable else None
            if messages is None:
                raise _explain_exit(process.wait(), cause, subject)
            for line in messages:
                # An error report is not final: the server may still become ready.
                if start_progress.KEY in line:
                    with suppress(OSError):  # the reader of the progress may have disconnected
                        on_progress(start_progress.StartProgress.parse(line[start_progress.KEY]))
                elif "failed" in line:
                    failed = StartFailure(**line["failed"])
                    cause = cause if cause and (failed.is_consequence or cause.lost_weights) else failed
                else:
                    report = report or line
    if reason := report.get("unfit"):
        process.wait()
        raise ServerExitedError(f"the prepared engine cannot be used for this start: {reason}")
    return ReadyServer(process, report, timeline.now() - since)


def _explain_exit(code: int, cause: StartFailure | None, subject: str) -> ServerExitedError:
    """Build the error for a process that exited before it was ready. `cause` is the error that it reported, if any."""
    from coldstart.system import probes  # a successful start does not need its imports

    if cause is not None and cause.is_final:
        died = cause.build_error(ServerExitedError)
    else:
        ended = f"the {subject} {exits.describe_exit(code)} before it was ready"
        because = "" if exits.is_killed(code) else "; its log contains the reason"
        hint = probes.find_full_directory() or (cause.hint if cause else None)
        died = ServerExitedError(f"{ended}: {cause.message}" if cause else ended + because, hint=hint)
    died.code, died.cause = code, cause
    return died
