"""Start a server and supervise it, for the command line, the Python API and the host."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from coldstart.contract.plan import LaunchPlan
from coldstart.launch import ladder, planning
from coldstart.launch.planning import ServeRequest
from coldstart.launch.server import Server, stop_on_error, supervise
from coldstart.system.ipc.peers import await_readable
from coldstart.system.recording import record_timeline
from coldstart.system.timeline import Timeline


def run_server(
    request: ServeRequest,
    plan: LaunchPlan,
    on_ready: Callable[[Server, Timeline], None],
    save_to: Path | None = None,
) -> int:
    """Start the server, announce it when it is ready, and supervise it until it exits.

    Args:
        request: Options of the start.
        plan: Launch plan of the request.
        on_ready: Called with the ready server and the timeline of its start. If it raises, the server is stopped.
        save_to: File to which the timeline is written as Chrome trace-event JSON, when the server is ready and when it exits.

    Returns:
        The exit code for this process (see `server.supervise`).

    Raises:
        CommandFailedError: The server exited or was not ready in time.
    """
    with record_timeline(save_to) as recorded:
        server = ladder.start_server(request, plan)
        with stop_on_error(server.running.process):
            recorded.save_start()
            on_ready(server, recorded.timeline)
            return supervise(server.running.process)


def start_server(request: ServeRequest) -> Server:
    """Plan and start a server, and return it after it has generated its first token.

    The server is killed when the calling process exits, whichever thread called this function.

    Raises:
        NoBundleError: No bundle has the key, and the request needs one.
        CommandFailedError: The server exited, was not ready in time, or its bundle lacks a required signature.
    """
    plan, ready, abandoned = planning.plan(request), Future[Server](), threading.Event()

    def keep() -> None:
        try:
            server = ladder.start_server(request, plan)
        except BaseException as error:  # noqa: BLE001 - the caller's thread raises it
            ready.set_exception(error)
            return
        ready.set_result(server)
        if abandoned.is_set():
            server.stop()
        await_readable(server.running.process)

    # The kernel kills a server when the thread that forked it exits, so the thread must run as long as the server.
    threading.Thread(target=keep, name="coldstart-server", daemon=True).start()
    try:
        return ready.result()
    except BaseException:
        abandoned.set()
        if ready.done() and ready.exception() is None:
            ready.result().stop()
        raise
