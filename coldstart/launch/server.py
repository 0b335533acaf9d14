"""Handle of a running server, and the supervision of its process.

Only `supervise`, which serves the command line, installs signal handlers.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from coldstart.contract import fallback
from coldstart.contract.fallback import Fallback
from coldstart.contract.plan import LaunchPlan
from coldstart.errors import LaunchRefusedError, UsageError
from coldstart.launch import listening
from coldstart.launch.server_process import SIGNAL_CHECK_S, ReadyServer, ServerProcess
from coldstart.system.ipc.peers import await_readable
from coldstart.system.proc import scratch

STOP_TIMEOUT_S = 30.0


@dataclass
class UnusedModes:
    """Start modes that were not used: the modes in `fallbacks` failed, and the modes in `unavailable` had not been prepared."""

    fallbacks: list[Fallback] = field(default_factory=list)
    unavailable: list[Fallback] = field(default_factory=list)

    def record_failure(self, mode: str, error: Exception) -> None:
        """Record that the start mode `mode` failed, with `error` as the reason."""
        hint = error.hint if isinstance(error, LaunchRefusedError) else None
        self.fallbacks += [Fallback(mode, str(error), hint)]


@dataclass(eq=False)
class Server(AbstractContextManager["Server"]):
    """A running vLLM server. Used as a context manager, it stops the server when the block ends.

    Attributes:
        mode: Name of the start mode that was used.
        plan: Launch plan with which it was started.
        running: Ready server process, with its readiness report.
        unused: Start modes that were not used.
        began: Time at which the start began, in seconds on CLOCK_MONOTONIC.
        early_fetch: Weight fetch that may still be running. It stops when this object is deleted.
    """

    mode: str
    plan: LaunchPlan
    running: ReadyServer
    unused: UnusedModes
    began: float = 0.0
    early_fetch: ExitStack | None = None
    _ending: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)
    _code: int | None = field(default=None, init=False, repr=False)

    @property
    def url(self) -> str:
        """Return the URL of the server, without a path."""
        return listening.find_url(self.plan.vllm_args)

    @property
    def pid(self) -> int:
        """Return the process ID of the server."""
        return self.running.process.pid

    @property
    def ready_s(self) -> float:
        """Return the time in seconds from the launch until the server generated its first token."""
        return self.running.ready_s

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """Return the optimizations that this start did not use, each with the reason."""
        return (*self.unused.fallbacks, *fallback.decode_fallbacks(self.running.report.get("fallbacks")))

    def document(self) -> dict[str, Any]:
        """Build the ready file: the address, start mode, PID, start time in seconds, and optimizations that were used."""
        report = self.running.report
        return {
            "url": self.url,
            "pid": self.pid,
            "mode": self.mode,
            "ready_s": round(self.ready_s, 4),
            "first_token_s": round(self.ready_s, 4),
            "fast_path": {
                "mode": not self.unused.fallbacks,
                **report.get("fast_path", {}),
            },
            "fallbacks": [*fallback.encode(self.unused.fallbacks), *report.get("fallbacks", [])],
            "absent": fallback.encode(self.unused.unavailable),
            "canary": report.get("canary"),
            "tokens": report.get("tokens"),
            "weights": self.plan.weights,
            "loads": report.get("loads", []),
        }

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def is_running(self) -> bool:
        """Return whether the server process is still running."""
        return not self._has_ended(0.0)

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait until the server exits.

        Args:
            timeout_s: Maximum time to wait in seconds. None means no limit.

        Returns:
            The exit code of the server, which is 128 + n after signal n.

        Raises:
            TimeoutError: The server is still running after `timeout_s` seconds.
        """
        if not self._has_ended(timeout_s):
            raise TimeoutError(f"server {self.pid} at {self.url} is still running after {timeout_s:g} s")
        with self._ending:
            if self._code is None:
                self._code = _reap(self.running.process)
            return self._code

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Send SIGTERM to the server, and SIGKILL if it is still running after `timeout_s` seconds.

        Returns:
            The exit code of the server, which is 128 + n after signal n. Later calls only return this code.
        """
        with self._ending:
            if self._code is None:
                self._code = end(self.running.process, timeout_s)
            return self._code

    def _has_ended(self, timeout_s: float | None) -> bool:
        # `poll` would reap the process, after which its session could no longer be killed.
        return self._code is not None or bool(await_readable(self.running.process, timeout_s=timeout_s))


@contextmanager
def stop_on_error(process: ServerProcess) -> Iterator[None]:
    """Stop the server if the block raises an exception, including KeyboardInterrupt."""
    try:
        yield
    except BaseException:
        end(process)
        raise


def end(process: ServerProcess, patience_s: float | None = None) -> int:
    """Send SIGTERM to the server, and SIGKILL after `patience_s` seconds (never if None). Return its exit code."""
    if not await_readable(process, timeout_s=0):
        process.signal(signal.SIGTERM)
        if not await_readable(process, timeout_s=patience_s):
            process.signal(signal.SIGKILL)
    return _reap(process)


def supervise(process: ServerProcess) -> int:
    """Wait until the server exits, forwarding SIGINT and SIGTERM to it. Return the exit code for this process.

    The code is 130 after SIGINT and 143 after SIGTERM. It is 1 if the server exits by itself, regardless of its own code.
    """
    caught: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        caught.append(number)
        process.signal(signal.SIGTERM if len(caught) == 1 else signal.SIGKILL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, forward)
    # Python runs the handler of a signal that arrives just before a system call only after the call returns.
    while not await_readable(process, timeout_s=SIGNAL_CHECK_S):
        pass
    _reap(process)
    return 128 + caught[0] if caught else 1


def _reap(process: ServerProcess) -> int:
    code = process.wait()
    with suppress(OSError, UsageError):
        # An engine that went back to sleep still uses its directory.
        resident = Path(f"/proc/{process.pid}").exists()
        # A killed server does not remove its directory itself.
        scratch.remove_dead_directories(None if resident else process.pid)
    return code
