"""Run a supervised server in a process of its own that outlives the command, and return the report of its start."""

import json
import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from coldstart.errors import CommandFailedError
from coldstart.system import start_progress

# Interval in seconds at which a waiting command handles signals.
SIGNAL_CHECK_S = 0.5


class Announce:
    """Sends what a detached process announces to the command that waits for it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        os.set_blocking(descriptor, False)

    def __call__(self, report: dict[str, Any]) -> None:
        """Send the report, which is all that the command waits for."""
        self.send({"report": report})

    def show(self, progress: start_progress.StartProgress) -> None:
        """Send the progress of the start, unless the command does not read it."""
        start_progress.write(self._descriptor, progress)

    def send(self, message: dict[str, Any]) -> None:
        """Send the last message. Later ones are dropped."""
        if self._descriptor >= 0:
            os.set_blocking(self._descriptor, True)
            with os.fdopen(self._descriptor, "w", encoding="utf-8") as pipe:
                self._descriptor = -1
                pipe.write(json.dumps(message) + "\n")


def start_detached(
    log: Path, run: Callable[[Announce], int], on_progress: start_progress.Report = start_progress.ignore
) -> dict[str, Any]:
    """Call `run` in a forked process with its own session and return what `run` announces. The output goes to `log`.

    `on_progress` receives what `run` announces before.

    Raises:
        CommandFailedError: The process ends before it announces anything; the error is its own, or the end of the log.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _run_detached(run, writer, output)
    try:
        os.close(writer)
        os.close(output)
        with os.fdopen(reader):
            message = _await_last(reader, on_progress)
    except (
        BaseException
    ):  # Ctrl-C included: otherwise the server would start without a command that awaits it
        _end(pid)
        raise
    if "report" in message:
        return dict(message["report"])
    _, status = os.waitpid(pid, 0)
    raise _explain(message, log, os.waitstatus_to_exitcode(status))


def _await_last(reader: int, on_progress: start_progress.Report) -> dict[str, Any]:
    """Return the last message on the pipe, an empty one if the process ends without it."""
    lines = start_progress.LineReader(reader)
    while True:
        # Python handles a signal that arrives just before a read only after the read, which may take minutes.
        while not select.select([reader], [], [], SIGNAL_CHECK_S)[0]:
            pass
        if (messages := lines.read()) is None:
            return {}
        for message in messages:
            if start_progress.KEY not in message:
                return message
            with suppress(OSError):  # what reads the command's output may have gone
                on_progress(start_progress.StartProgress.parse(message[start_progress.KEY]))


def _run_detached(run: Callable[[Announce], int], writer: int, output: int) -> NoReturn:
    code, announce = 1, Announce(writer)
    try:
        os.setsid()
        _redirect(output)
        code = run(announce)
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else 1
    except BaseException as error:  # noqa: BLE001 - the last frame of this process: report and exit
        _report(error, announce)
    finally:
        sys.stderr.flush()
        os._exit(code)


def _redirect(output: int) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, descriptor in enumerate((nothing, output, output)):
        os.dup2(descriptor, target)


def _report(error: BaseException, announce: Announce) -> None:
    lines = getattr(error, "lines", None) or [f"{type(error).__name__}: {error}"]
    sys.stderr.write("".join(f"error: {line}\n" for line in lines))
    final = {"exit_code": getattr(error, "exit_code", None)} if getattr(error, "is_final", False) else {}
    announce.send({"error": list(lines), "hint": getattr(error, "hint", None), **final})


def _explain(message: dict[str, Any], log: Path, code: int) -> CommandFailedError:
    from coldstart.system.proc import logs

    if code in (-signal.SIGTERM, 128 + signal.SIGTERM):
        return CommandFailedError(
            "the server was stopped by SIGTERM, which coldstart down sends, before it was ready"
        )
    if "exit_code" in message:  # the error names its cause
        return CommandFailedError(message["error"], hint=message["hint"], exit_code=message["exit_code"])
    tail = logs.end(log).splitlines()
    lines = message.get("error") or ["The server ended before it was ready."]
    return CommandFailedError([*lines, f"The end of {log}:", *tail], hint=message.get("hint"))


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)
    os.waitpid(pid, 0)
