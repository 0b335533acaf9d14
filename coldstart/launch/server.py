"""A server that is ready: its handle, its end, and the supervision of its process.

Nothing but `stay`, which serves the command line, installs a signal handler.
"""

from __future__ import annotations

import select
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from coldstart.contract import fallback
from coldstart.contract.fallback import Fallback
from coldstart.contract.plan import LaunchPlan
from coldstart.errors import LaunchRefusedError, UsageError
from coldstart.launch import listening
from coldstart.launch.server_process import SIGNAL_CHECK_S, Running, ServerProcess
from coldstart.system.proc import scratch

if TYPE_CHECKING:
    from contextlib import ExitStack

STOP_TIMEOUT_S = 30.0


@dataclass
class Account:
    """Modes that were not used: `fallbacks` of modes that failed, `unavailable` modes that were not prepared."""

    fallbacks: list[Fallback] = field(default_factory=list)
    unavailable: list[Fallback] = field(default_factory=list)

    def fall_back(self, stage: str, error: Exception) -> None:
        """Record the failure of `stage`."""
        hint = error.hint if isinstance(error, LaunchRefusedError) else None
        self.fallbacks += [Fallback(stage, str(error), hint)]


@dataclass(eq=False)
class Server:
    """A running vLLM server. As a context manager it stops when the block ends.

    Attributes:
        mode: Name of the start mode that was used.
        plan: Launch plan that it was started with.
        running: Its process, and its report of readiness.
        account: Start modes that were not used.
        began: Begin of the start, in seconds on CLOCK_MONOTONIC.
        ahead: Weight fetch that may still run; it ends with this object.
    """

    mode: str
    plan: LaunchPlan
    running: Running
    account: Account
    began: float = 0.0
    ahead: ExitStack | None = None
    _ending: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)
    _code: int | None = field(default=None, init=False, repr=False)

    @property
    def url(self) -> str:
        """Address of the server, without a path."""
        return listening.find_url(self.plan.vllm_args)

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self.running.process.pid

    @property
    def ready_s(self) -> float:
        """Seconds from the launch until the server returned its first token."""
        return self.running.ready_s

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """The parts of the start that vLLM did in its ordinary way, each with the reason."""
        return (*self.account.fallbacks, *fallback.decode(self.running.report.get("fallbacks")))

    def document(self) -> dict[str, Any]:
        """Return the ready file: address, mode, pid, seconds, and the server's report on its fast path."""
        report = self.running.report
        return {
            "url": self.url,
            "pid": self.pid,
            "mode": self.mode,
            "ready_s": round(self.ready_s, 4),
            "first_token_s": round(self.ready_s, 4),
            "fast_path": {
                "mode": not self.account.fallbacks,
                **report.get("fast_path", {}),
            },
            "fallbacks": [*fallback.encode(self.account.fallbacks), *report.get("fallbacks", [])],
            "absent": fallback.encode(self.account.unavailable),
            "canary": report.get("canary"),
            "tokens": report.get("tokens"),
            "loads": report.get("loads", []),
        }

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
                self._code = _reap(self.running.process)
            return self._code

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Stop the server: SIGTERM, then SIGKILL if it still runs after `timeout_s` seconds. A stopped server stays stopped.

        Returns:
            The exit code of the server, 128 + n after signal n.
        """
        with self._ending:
            if self._code is None:
                self._code = end(self.running.process, timeout_s)
            return self._code

    def _has_ended(self, timeout_s: float | None) -> bool:
        # `poll` would reap the process, and its session could no longer be ended with it.
        return self._code is not None or has_ended(self.running.process, timeout_s)


@contextmanager
def end_on_error(process: ServerProcess) -> Iterator[None]:
    """End the server if the block raises, Ctrl-C included."""
    try:
        yield
    except BaseException:
        end(process)
        raise


def end(process: ServerProcess, patience_s: float | None = None) -> int:
    """End the server: SIGTERM, then SIGKILL after `patience_s` seconds (None: no limit). Return its exit code."""
    if not has_ended(process, 0.0):
        process.signal(signal.SIGTERM)
        if not has_ended(process, patience_s):
            process.signal(signal.SIGKILL)
    return _reap(process)


def stay(process: ServerProcess) -> int:
    """Wait until the server exits, forward SIGINT and SIGTERM, and return the exit code for this process.

    The code is 130 or 143 after a signal. It is 1 if the server exits by itself with any code: a server should keep running.
    """
    caught: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        caught.append(number)
        process.signal(signal.SIGTERM if len(caught) == 1 else signal.SIGKILL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, forward)
    # Python handles a signal that arrives just before the wait only after it.
    while not has_ended(process, SIGNAL_CHECK_S):
        pass
    _reap(process)
    return 128 + caught[0] if caught else 1


def has_ended(process: ServerProcess, timeout_s: float | None) -> bool:
    """Return whether the server ends within `timeout_s` seconds (None: no limit)."""
    return bool(select.select([process.fileno()], [], [], timeout_s)[0])


def _reap(process: ServerProcess) -> int:
    """Wait until the server has ended, remove what it leaves behind, and return its exit code."""
    code = process.wait()
    _sweep(process)
    return code


def _sweep(process: ServerProcess) -> None:
    with suppress(OSError, UsageError):
        # An engine that went back to sleep keeps its directory.
        resident = Path(f"/proc/{process.pid}").exists()
        scratch.remove_dead_directories(
            None if resident else process.pid
        )  # a killed server leaves its directory
