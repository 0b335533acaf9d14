"""Start and stop a server: the launcher protocol, and the handle of a launched server.

Invariant: after `LaunchedServer.stop`, no process created by the start is alive. Processes that existed before, such as a
template, receive no signal. Signals are sent by process ID, never by name.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from coldstart.artifacts import canonical
from coldstart.contract.fallback import Fallback, decode_fallbacks
from coldstart.errors import CommandFailedError, describe_reason
from coldstart.launch.completions import CompletionFailedError
from coldstart.system.ipc.addresses import find_free_port
from coldstart.system.proc import exits, processes, scratch

if TYPE_CHECKING:
    import psutil

    from coldstart.system.proc.tree import ProcessTree

HOST = "127.0.0.1"
STOP_TIMEOUT_S = 20.0
KILL_TIMEOUT_S = 5.0
READY_FILE_TIMEOUT_S = 30.0


class ModeUnavailableError(Exception):
    """Error for a start mode that this machine cannot run. The message states the reason."""


class ServerExitedError(CommandFailedError):
    """Error for a server that exited before it was stopped. `status` is its exit status."""

    def __init__(self, mode: str, status: int, read_log_tail: str) -> None:
        super().__init__(
            [
                f"the {mode} server exited with code {status} before its first token; the end of its log:",
                *read_log_tail.splitlines(),
            ],
            hint="run `coldstart doctor`",
        )
        self.status = status


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Directory and free port of one run, and the files in that directory."""

    directory: Path
    port: int

    @property
    def ready_file(self) -> Path:
        return self.directory / "ready.json"

    @property
    def events_file(self) -> Path:
        return self.directory / "events.jsonl"

    @property
    def log_file(self) -> Path:
        return self.directory / "server.log"

    @classmethod
    def create(cls, directory: Path) -> RunFiles:
        directory.mkdir(parents=True)
        return cls(directory, find_free_port(HOST))


class Launcher(Protocol):
    """A way to start a server. With `writes_ready_file`, the server writes `RunFiles.ready_file` when it is ready."""

    mode: str
    writes_ready_file: bool

    def prepare(self) -> None:
        """Prepare for the runs, for example by starting a template. By default, nothing is prepared.

        Raises ModeUnavailableError, CommandFailedError, NoBundleError.
        """
        return

    def build_command(self, files: RunFiles) -> tuple[Sequence[str], Mapping[str, str]]:
        """Return the command that starts a server on HOST:files.port, and the environment variables to add for it."""
        ...

    def close(self) -> None:
        """Stop the processes that `prepare` started."""
        return


@dataclass
class LaunchedServer:
    """Launched server. `tree` contains the processes of its command and of the server that its ready file reports."""

    launcher: Launcher
    files: RunFiles
    process: subprocess.Popen[bytes]
    launched_s: float
    tree: ProcessTree

    def check_alive(self) -> None:
        """Raise ServerExitedError if the launched process exited with an error.

        Status 0 is allowed, because the process may have handed over to a template's server.
        """
        status = self.process.poll()
        if status:
            raise ServerExitedError(self.launcher.mode, status, self.read_log_tail())

    def read_log_tail(self) -> str:
        """Return the last lines of the server's log."""
        return exits.read_log_tail(self.files.log_file)

    def read_readiness(self) -> Mapping[str, object]:
        """Return the contents of the ready file, or an empty mapping if the launcher writes none.

        Raises ServerExitedError, and CommandFailedError if the file is missing after READY_FILE_TIMEOUT_S.
        """
        deadline_s = time.monotonic() + READY_FILE_TIMEOUT_S
        while self.launcher.writes_ready_file and not self.files.ready_file.exists():
            self.check_alive()
            if time.monotonic() > deadline_s:
                raise CommandFailedError(
                    f"the {self.launcher.mode} server responded but wrote no ready file, so its fast path cannot be verified",
                    hint="run `coldstart doctor`",
                )
            time.sleep(0.01)
        return _read_ready_file(self.files.ready_file) if self.launcher.writes_ready_file else {}

    def list_processes(self) -> list[psutil.Process]:
        """Return the processes created by this start that are still running."""
        server_pid = (
            _read_ready_file(self.files.ready_file).get("pid") if self.files.ready_file.exists() else None
        )
        if isinstance(server_pid, int):
            self.tree.adopt(server_pid)
        return [one for one in self.tree.list_processes() if processes.read_identity(one.pid) is not None]

    def stop(self) -> None:
        """Send SIGTERM, wait, then send SIGKILL to every remaining process of the start.

        The launched process forwards SIGTERM. If it has exited, the remaining processes receive SIGTERM directly.
        """
        self.list_processes()  # record them now: children of an exited process cannot be found
        if self.process.poll() is None:
            self.process.terminate()
            self._wait(STOP_TIMEOUT_S, lambda: self.process.poll() is None)
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            for process in self.list_processes():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal_number)
            self._wait(KILL_TIMEOUT_S, lambda: bool(self.list_processes()))
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # processes of its session that were never listed
        self.process.wait()

    def _wait(self, seconds: float, busy: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + seconds
        while busy() and time.monotonic() < deadline_s:
            time.sleep(0.02)


def launch(launcher: Launcher, files: RunFiles, sockets: Path) -> LaunchedServer:
    """Start a server in a new session without waiting for it. Raises OSError if the command cannot be executed.

    `sockets` is the directory for vLLM's sockets, because the path of the run's own directory may be too long for them.
    """
    from coldstart.system.proc.tree import ProcessTree

    argv, variables = launcher.build_command(files)
    environment = {scratch.SOCKETS_VARIABLE: str(sockets), **os.environ, **variables}
    with files.log_file.open("wb") as log:
        launched_s = time.monotonic()
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    return LaunchedServer(launcher, files, process, launched_s, ProcessTree(process.pid))


@contextmanager
def run_server(launcher: Launcher, directory: Path) -> Iterator[LaunchedServer]:
    """Launch a server without waiting for it, and stop it at the end of the block, even after an error.

    Raises ServerExitedError, and CommandFailedError if a request in the block gets no response.
    """
    with scratch.private_directory(scratch.PREFIX) as sockets:
        server = launch(launcher, RunFiles.create(directory), sockets)
        try:
            yield server
        except CompletionFailedError as error:
            server.check_alive()
            raise CommandFailedError(
                [
                    f"the {launcher.mode} server did not respond: {error}; the end of its log:",
                    *server.read_log_tail().splitlines(),
                ],
                hint="run `coldstart doctor`",
            ) from error
        finally:
            server.stop()


def explain_slow_path(readiness: Mapping[str, object]) -> list[Fallback]:
    """Return the reasons why a server did not use all sections of its bundle, or none if it did."""
    taken, listed = readiness.get("fast_path"), readiness.get("fallbacks")
    if not isinstance(taken, Mapping) or not isinstance(listed, list):
        return [Fallback("bundle", "the ready file does not list the sections in use")]
    if not taken and not listed and readiness.get("canary") is not True:
        return [Fallback("bundle", "no section was used")]
    unexplained = [
        Fallback(section, "the server gave no reason") for section, used in taken.items() if not used
    ]
    return decode_fallbacks(listed) or unexplained


def _read_ready_file(path: Path) -> dict[str, object]:
    try:
        if not isinstance(value := canonical.read_json(path), dict):
            raise ValueError("expected a JSON object")
    except ValueError as error:
        raise CommandFailedError(
            f"the server wrote an invalid ready file: {describe_reason(error)}", hint="run `coldstart doctor`"
        ) from error
    return value
