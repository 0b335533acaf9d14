"""Run a supervised server in a process of its own that outlives the command, and return the report of its start."""

import json
import os
import select
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from coldstart.errors import CommandFailedError

# Interval in seconds at which a waiting command handles signals.
SIGNAL_CHECK_S = 0.5

Announce = Callable[[dict[str, Any]], None]


def start_detached(log: Path, run: Callable[[Announce], int]) -> dict[str, Any]:
    """Call `run` in a forked process with its own session and return what `run` announces. The output goes to `log`.

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
        with os.fdopen(reader, encoding="utf-8") as pipe:
            # Python handles a signal that arrives just before a read only after the read, which may take minutes.
            while not select.select([pipe], [], [], SIGNAL_CHECK_S)[0]:
                pass
            message = json.loads(pipe.readline() or "{}")
    except (
        BaseException
    ):  # Ctrl-C included: otherwise the server would start without a command that awaits it
        _end(pid)
        raise
    if "report" in message:
        return dict(message["report"])
    os.waitpid(pid, 0)
    raise _explain(message, log)


def _run_detached(run: Callable[[Announce], int], writer: int, output: int) -> NoReturn:
    code = 1
    with os.fdopen(writer, "w", encoding="utf-8") as pipe:
        try:
            os.setsid()
            _redirect(output)

            def announce(report: dict[str, Any]) -> None:
                pipe.write(json.dumps({"report": report}) + "\n")
                pipe.close()

            code = run(announce)
        except SystemExit as stopped:
            code = stopped.code if isinstance(stopped.code, int) else 1
        except BaseException as error:  # noqa: BLE001 - the last frame of this process: report and exit
            _report(error, pipe)
        finally:
            sys.stderr.flush()
            os._exit(code)


def _redirect(output: int) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, descriptor in enumerate((nothing, output, output)):
        os.dup2(descriptor, target)


def _report(error: BaseException, pipe: Any) -> None:
    lines = getattr(error, "lines", None) or [f"{type(error).__name__}: {error}"]
    sys.stderr.write("".join(f"error: {line}\n" for line in lines))
    if not pipe.closed:
        pipe.write(json.dumps({"error": list(lines), "hint": getattr(error, "hint", None)}) + "\n")
        pipe.flush()


def _explain(message: dict[str, Any], log: Path) -> CommandFailedError:
    from coldstart.system.proc import logs

    tail = logs.end(log).splitlines()
    lines = message.get("error") or ["The server ended before it was ready."]
    return CommandFailedError([*lines, f"The end of {log}:", *tail], hint=message.get("hint"))


def _end(pid: int) -> None:
    import signal

    os.kill(pid, signal.SIGTERM)
    os.waitpid(pid, 0)
