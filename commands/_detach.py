"""Start `coldstart serve` in the background: a process that outlives the command, which awaits its readiness.

The process reports on the pipe on which a supervisor awaits an engine's server, so one function awaits both.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from coldstart.contract import environment
from coldstart.contract.plan import READY_FD_ENV
from coldstart.errors import CommandFailedError
from coldstart.launch import server_process
from coldstart.launch.server import end_on_error
from coldstart.system.proc import exits
from coldstart.system.start_progress import Report

# Its options come from the command alone, not from the environment.
_OPTIONS = f"{environment.PREFIX}_SERVE_"


def start_detached(
    words: Sequence[str], log: Path, lock: int, started: Callable[[int], None], on_progress: Report
) -> Mapping[str, Any]:
    """Run `coldstart serve WORDS` in a new session and return the report of its start.

    Args:
        words: Arguments of `serve`.
        log: File for its output.
        lock: Descriptor of a lock that the process holds as long as it runs.
        started: Called with its PID.
        on_progress: Called with each report of the start's progress.

    Raises:
        CommandFailedError: The process ends before the server is ready.
    """
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    reader, writer = os.pipe()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OPTIONS)}
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "coldstart.commands.cli", "serve", "--format", "json", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=kept | {READY_FD_ENV: str(writer)},
            pass_fds=(writer, lock),
            start_new_session=True,
        )
    finally:
        os.close(output)
        os.close(writer)
    child = server_process.Child(process)
    try:
        # Ctrl-C included: otherwise the server would start without a command that awaits it.
        with end_on_error(child):
            started(process.pid)
            return server_process.acknowledged(child, reader, time.monotonic(), None, on_progress).report
    except server_process.ServerExitedError as died:
        raise _explain(died, log) from died


def _explain(died: server_process.ServerExitedError, log: Path) -> CommandFailedError:
    if died.code == 128 + signal.SIGTERM:
        return CommandFailedError(
            "the server was stopped by SIGTERM, which coldstart down sends, before it was ready"
        )
    tail, error = exits.read_end(log).splitlines(), dict[str, Any]()
    with suppress(ValueError, LookupError):  # a process that was killed has written no error
        error = json.loads(log.read_text(errors="replace").splitlines()[-1])
        tail = tail[:-1]
    lines = [*error.get("error", died.message).splitlines(), f"The end of {log}:", *tail]
    return CommandFailedError(lines, hint=error.get("hint"), exit_code=error.get("exit_code"))
