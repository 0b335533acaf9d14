"""Handle of a server that the calling process started, for programs that embed one.

Invariant: the server ends with the process that started it, whichever thread began the start. Nothing here installs a
signal handler; `supervise.stay` does that for the command line.
"""

from __future__ import annotations

import select
import threading
from concurrent.futures import Future
from types import TracebackType

from coldstart.contract import fallback
from coldstart.contract.fallback import Fallback
from coldstart.launch import ladder, planning, supervise
from coldstart.launch.ladder import StartedServer
from coldstart.launch.request import ServeRequest

STOP_TIMEOUT_S = 30.0


class Server:
    """A running vLLM server. As a context manager it stops when the block ends.

    Attributes:
        url: Address of the server, without a path.
        mode: Name of the start mode that was used.
        pid: Process id of the server.
        ready_s: Time from the begin of the start until the server answered one token, in seconds.
        fallbacks: Each part of the start that was done the ordinary way, with the reason.
    """

    def __init__(self, started: StartedServer) -> None:
        self.url = planning.url(started.plan)
        self.mode = started.mode
        self.pid = started.running.process.pid
        self.ready_s = started.running.ready_s
        reported = fallback.decode(started.running.report.get("fallbacks"))
        self.fallbacks: tuple[Fallback, ...] = (*started.account.fallbacks, *reported)
        # Also keeps the connections through which weights are still fetched.
        self._started = started
        self._ending = threading.Lock()
        self._code: int | None = None

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def is_running(self) -> bool:
        """Return whether the server process has not ended."""
        return not self._has_ended(0.0)

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait until the server ends.

        Args:
            timeout_s: Longest time to wait, in seconds; None waits without a limit.

        Returns:
            The exit code of the server, 128 + n after signal n.

        Raises:
            TimeoutError: The server still runs after `timeout_s`.
        """
        if not self._has_ended(timeout_s):
            raise TimeoutError(f"server {self.pid} at {self.url} still runs after {timeout_s:g} s")
        with self._ending:
            if self._code is None:
                self._code = supervise.reap(self._started.running.process)
            return self._code

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Stop the server: SIGTERM, then SIGKILL if it still runs after `timeout_s` seconds. A stopped server stays stopped.

        Returns:
            The exit code of the server, 128 + n after signal n.
        """
        with self._ending:
            if self._code is None:
                self._code = supervise.end(self._started.running.process, timeout_s)
            return self._code

    def _has_ended(self, timeout_s: float | None) -> bool:
        # `poll` would reap the process, and its session could no longer be ended with it.
        return self._code is not None or supervise.has_ended(self._started.running.process, timeout_s)


def start(request: ServeRequest) -> Server:
    """Plan and start the server, and wait until it has generated one token.

    Raises:
        NoBundleError: No bundle has the key, and the request needs one.
        CommandFailedError: The server died, was not ready in time, or its bundle is not signed as required.
    """
    plan, ready, abandoned = planning.plan(request), Future[Server](), threading.Event()

    def keep() -> None:
        try:
            server = Server(ladder.start(request, plan))
        except BaseException as error:  # noqa: BLE001 - the caller's thread raises it
            ready.set_exception(error)
            return
        ready.set_result(server)
        if abandoned.is_set():
            server.stop()
        select.select([server._started.running.process], [], [])

    # The kernel ends a server when the thread that forked it ends, so that thread stays as long as the server.
    threading.Thread(target=keep, name="coldstart-server", daemon=True).start()
    try:
        return ready.result()
    except BaseException:
        abandoned.set()
        if ready.done() and ready.exception() is None:
            ready.result().stop()
        raise
