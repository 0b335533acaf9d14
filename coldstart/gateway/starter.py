"""The process that starts servers for a host: it has imported what a start needs, and forks one supervisor for each.

A start is blocking work of a second of processor time, and a server must hear of its supervisor's death. So neither happens in
the gateway, whose loop stays free: a supervisor is a small process of its own that plans, starts, and stays with its server as
`coldstart serve` does, without paying an interpreter's start and its imports (0.4 s) each time.

The gateway holds one connection to the starter, and one to each supervisor. The latter is a lease: its end, however the gateway
ended, ends the server. Messages of a supervisor: {"ready": document}, {"failed": reason}, {"exit": code}; to it: {"signal": n}.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Thread
from types import FrameType
from typing import Any, NoReturn

from coldstart.errors import ColdstartError
from coldstart.machine import ipc
from coldstart.machine.lifeline import die_with_supervisor

# From the end of the lease until the server is killed.
GRACE_S = 10.0
Run = Callable[[Mapping[str, Any], ipc.Channel], int]


def main(descriptor: int) -> None:
    """Fork a supervisor for each message until the gateway's end of the connection closes."""
    die_with_supervisor()
    _import()
    serve_forever(ipc.Channel(socket.socket(fileno=descriptor)), supervise)


def _import() -> None:
    import coldstart.key.inspection
    import coldstart.machine.recording
    import coldstart.serve.prepare
    import coldstart.serve.serve  # noqa: F401


def serve_forever(channel: ipc.Channel, run: Run) -> None:
    """One fork for each message, which brings the lease's end and the log as descriptors."""
    # Nobody waits for supervisors: their leases tell how they ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for message in channel.replies():
        lease, log = channel.take(), channel.take()
        if os.fork() == 0:
            channel.close()
            _become_supervisor(message, lease, log, run)
        os.close(lease)
        os.close(log)


def _become_supervisor(message: Mapping[str, Any], lease: int, log: int, run: Run) -> NoReturn:
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _stop)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        channel = ipc.Channel(socket.socket(fileno=lease))
        Thread(target=_obey, args=(channel,), name="lease", daemon=True).start()
        code = _answered(message, channel, run)
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _answered(message: Mapping[str, Any], channel: ipc.Channel, run: Run) -> int:
    try:
        code = run(message, channel)
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else 1
    except Exception as error:  # noqa: BLE001 - the gateway answers with whatever it was
        return _say(channel, {"failed": _reason(error)}, 1)
    return _say(channel, {"exit": code}, code)


def _say(channel: ipc.Channel, message: Mapping[str, Any], code: int) -> int:
    with suppress(OSError):  # the gateway has gone
        channel.send(message)
    return code


def _reason(error: Exception) -> str:
    if isinstance(error, ColdstartError):
        return error.message + (f" (mend: {error.mend})" if error.mend else "")
    import traceback

    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _obey(channel: ipc.Channel) -> None:
    """Pass the gateway's signals on to this process's main thread; end with the lease."""
    with suppress(Exception):
        for message in channel.replies():
            os.kill(os.getpid(), int(message["signal"]))
    os.kill(os.getpid(), signal.SIGTERM)
    import time

    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGTERM)


def supervise(message: Mapping[str, Any], channel: ipc.Channel) -> int:
    """Start what the message describes, say when it is ready, and stay with it; its exit code.

    Raises what planning and starting raise.
    """
    from pathlib import Path

    from coldstart.artifacts.bundle import anyone
    from coldstart.key import inspection
    from coldstart.machine import secrets
    from coldstart.machine.paths import Cache
    from coldstart.machine.recording import recording
    from coldstart.serve import serve

    # Before anything looks for a device.
    os.environ.update(message["environment"])
    found = inspection.look_up(
        message["model"],
        message["args"],
        cache=Cache.at(Path(message["cache"])),
        offline=message["offline"],
        revision=message["revision"],
        accepts=anyone if message["untrusted"] else None,
    )
    listen = (*message["listen"], "--served-model-name", *message["served"])
    request = serve.ServeRequest(
        found,
        listen,
        mode=message["mode"],
        without_bundle=message["on_miss"] == "warn",
        ready_timeout=message["ready_timeout"],
    )
    plan = serve.plan(request)
    with recording(None, wanted=True) as recorded:
        started = serve.start(request, plan)
        recorded.started()
    document = started.document() | {"phases": recorded.timeline.phases(), "supervisor": os.getpid()}
    channel.send({"ready": secrets.document(document)})
    return serve.stay(started.running.process)


if __name__ == "__main__":
    main(int(sys.argv[1]))
