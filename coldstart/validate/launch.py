"""Start and stop one server: the protocol of a launcher, and the handle of the started server.

Invariant: after `LaunchedServer.stop` no process that the start created is alive. Processes that existed before (a template)
are not touched. Processes are signalled by process id, never by name. psutil is imported only when a server is launched.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from coldstart.artifacts import canonical
from coldstart.errors import CommandFailedError, describe
from coldstart.launch.completions import NoAnswerError
from coldstart.system.ipc.addresses import free_port
from coldstart.system.proc import exits, processes, scratch

if TYPE_CHECKING:
    import psutil

    from coldstart.system.proc.tree import ProcessTree

HOST = "127.0.0.1"
STOP_S = 20.0
LEFTOVER_S = 5.0
READY_PATIENCE_S = 30.0


class ModeUnavailableError(Exception):
    """This mode cannot run on this machine; the message is the reason."""


class ServerDiedError(CommandFailedError):
    """The server ended before it was stopped; `status` is its exit status."""

    def __init__(self, mode: str, status: int, tail: str) -> None:
        super().__init__(
            [
                f"the {mode} server ended with status {status} before its first token; the end of its log:",
                *tail.splitlines(),
            ],
            hint="coldstart doctor",
        )
        self.status = status


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Directory and free port of one run."""

    directory: Path
    port: int

    @property
    def ready(self) -> Path:
        return self.directory / "ready.json"

    @property
    def events(self) -> Path:
        return self.directory / "events.jsonl"

    @property
    def log(self) -> Path:
        return self.directory / "server.log"

    @classmethod
    def make(cls, directory: Path) -> RunFiles:
        directory.mkdir(parents=True)
        return cls(directory, free_port(HOST))


@dataclass(frozen=True, slots=True)
class Command:
    """The command of a server: argument vector, and the variables added to this process's environment."""

    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


class Launcher(Protocol):
    """One way of starting a server. `tells_readiness`: the server writes `RunFiles.ready` once it is ready."""

    @property
    def mode(self) -> str: ...

    @property
    def tells_readiness(self) -> bool: ...

    def prepare(self) -> None:
        """Create what every run needs. Raises ModeUnavailableError, CommandFailedError, NoBundleError."""

    def command(self, files: RunFiles) -> Command:
        """Return the command that starts one server on HOST:files.port."""
        ...

    def close(self) -> None:
        """End what `prepare` started. Do nothing if it was not called."""


@dataclass
class LaunchedServer:
    """A started server. `tree` has the processes of its command, and those of the server that it reports."""

    launcher: Launcher
    files: RunFiles
    process: subprocess.Popen[bytes]
    launched_s: float
    tree: ProcessTree

    @property
    def mode(self) -> str:
        return self.launcher.mode

    def check(self) -> None:
        """Raise ServerDiedError if the launched process ended with an error.

        A launcher that hands over to another server may end with status 0.
        """
        status = self.process.poll()
        if status:
            raise ServerDiedError(self.mode, status, self.tail())

    def tail(self) -> str:
        """Return the end of the server's output."""
        return exits.read_end(self.files.log)

    def read_readiness(self) -> Mapping[str, object]:
        """Return the content of the ready file, empty for a launcher that writes none.

        Raises ServerDiedError, or CommandFailedError if the file is missing after READY_PATIENCE_S.
        """
        deadline_s = time.monotonic() + READY_PATIENCE_S
        while self.launcher.tells_readiness and not self.files.ready.exists():
            self.check()
            if time.monotonic() > deadline_s:
                raise CommandFailedError(
                    f"the {self.mode} server answered, but reported no readiness: its fast path is unproven",
                    hint="coldstart doctor",
                )
            time.sleep(0.01)
        return _object(self.files.ready) if self.launcher.tells_readiness else {}

    def processes(self) -> list[psutil.Process]:
        """Return the processes that this start created and that still run."""
        served = _object(self.files.ready).get("pid") if self.files.ready.exists() else None
        if isinstance(served, int):
            self.tree.adopt(served)
        return [one for one in self.tree.list_processes() if processes.birth(one.pid) is not None]

    def stop(self) -> None:
        """Send SIGTERM, wait, then send SIGKILL to every remaining process of the start.

        The launched process forwards SIGTERM; where it has handed over and ended, the remaining processes receive it directly.
        """
        self.processes()  # those of an ended process cannot be found
        if self.process.poll() is None:
            self.process.terminate()
            self._wait(STOP_S, lambda: self.process.poll() is None)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self.processes():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)
            self._wait(LEFTOVER_S, lambda: bool(self.processes()))
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # of its session, what was never seen
        self.process.wait()

    def _wait(self, seconds: float, busy: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + seconds
        while busy() and time.monotonic() < deadline_s:
            time.sleep(0.02)


def launch(launcher: Launcher, files: RunFiles, sockets: Path) -> LaunchedServer:
    """Start a server in a new session, without waiting. Raises OSError if it cannot be executed.

    vLLM's sockets are in the directory `sockets`, because the run's own directory can be too long for them.
    """
    from coldstart.system.proc.tree import ProcessTree

    command = launcher.command(files)
    environment = {scratch.SOCKETS_VARIABLE: str(sockets), **os.environ, **command.environment}
    with files.log.open("wb") as log:
        launched_s = time.monotonic()
        process = subprocess.Popen(
            list(command.argv),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    return LaunchedServer(launcher, files, process, launched_s, ProcessTree(process.pid))


@contextmanager
def serving(launcher: Launcher, directory: Path) -> Iterator[LaunchedServer]:
    """Launch a server without waiting for it, and stop it at the end of the block in every case.

    Raises ServerDiedError, or CommandFailedError where it does not answer a request of the block.
    """
    with scratch.private_directory(scratch.PREFIX) as sockets:
        server = launch(launcher, RunFiles.make(directory), sockets)
        try:
            yield server
        except NoAnswerError as error:
            server.check()
            raise CommandFailedError(
                [
                    f"the {launcher.mode} server gave no answer: {error}; the end of its log:",
                    *server.tail().splitlines(),
                ],
                hint="coldstart doctor",
            ) from error
        finally:
            server.stop()


def explain_slow_path(readiness: Mapping[str, object]) -> list[str]:
    """Return the reasons why a coldstart server did not use its complete bundle; empty if it did."""
    taken, fallbacks = readiness.get("fast_path"), readiness.get("fallbacks")
    if not isinstance(taken, Mapping) or not isinstance(fallbacks, list):
        return ["the ready file does not report the used sections"]
    missing = [f"{section} was not used" for section, used in taken.items() if not used]
    explained = [f"{entry.get('section')}: {entry.get('reason')}" for entry in fallbacks]
    if not taken and not explained and readiness.get("canary") is not True:
        return ["no section of the bundle was used"]
    return explained or missing


def _object(path: Path) -> dict[str, object]:
    try:
        value = canonical.read(path)
    except ValueError as error:
        raise CommandFailedError(
            f"the server wrote an invalid ready file: {describe(error)}", hint="coldstart doctor"
        ) from error
    if not isinstance(value, dict):
        raise CommandFailedError(
            "the server wrote a ready file without a JSON object", hint="coldstart doctor"
        )
    return value
