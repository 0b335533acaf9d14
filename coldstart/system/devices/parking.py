"""Move the GPU state of all processes of an engine to host memory and back, as one operation that succeeds or is undone.

All processes are locked before the first one is checkpointed, and all are restored before the first one continues,
because a rank that runs alone waits for the others. The driver keeps the state of each process. A step that fails, or
during which the helper process dies, is undone based on those states.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from coldstart.contract.arguments import Arguments
from coldstart.system.devices import parker
from coldstart.system.ipc.peers import await_readable

OLDEST_DRIVER = 570
"""Oldest driver with the functions that `parker` calls."""
RUNNING, LOCKED, CHECKPOINTED = range(3)  # CUprocessState of cuda.h
Steps = Sequence[tuple[str, int, int]]
# Each step with the state before and after it.
_PARK: Steps = (("lock", RUNNING, LOCKED), ("checkpoint", LOCKED, CHECKPOINTED))
_UNPARK: Steps = (("restore", CHECKPOINTED, LOCKED), ("unlock", LOCKED, RUNNING))
_STEP_S = 120.0
_UNDO_ATTEMPTS = 3


class StepError(Exception):
    """Error for a step that failed, or for a helper process that exited or did not respond."""


class ParkingError(Exception):
    """Error for processes that cannot be parked, or that cannot be used because only some of them are parked."""


def find_limit(driver: str | None) -> tuple[str, str] | None:
    """Return the reason why this NVIDIA driver version cannot park a process, and a hint, or None if it can."""
    hint = "use the level asleep-1, or update the driver"
    if driver is None:
        return "parking needs an NVIDIA driver, but none responds", "coldstart doctor"
    major = driver.split(".")[0]
    if not major.isdigit() or int(major) < OLDEST_DRIVER:
        return f"parking needs driver {OLDEST_DRIVER} or later, but this driver is {driver}", hint
    return None


def find_engine_limit(given: Arguments) -> tuple[str, str] | None:
    """Return the reason why an engine with the vLLM arguments `given` cannot be parked, and a hint, or None if it can."""
    for name in ("nnodes", "data_parallel_size"):
        if (size := given.get_value(name, 1)) != 1:
            option = f"--{name}".replace("_", "-")
            return f"parking supports only one engine on one host, but {option} is {size}", f"omit {option}"
    if given.get_value("distributed_executor_backend") == "ray":
        hint = "omit --distributed-executor-backend"
        return "parking supports only one host, but Ray may place workers on other hosts", hint
    return None


class Parking:
    """Processes of one engine, and the helper process that parks them. `pids` are all processes that use a device."""

    def __init__(self, pids: Sequence[int]) -> None:
        self.pids = tuple(pids)
        self._helper: subprocess.Popen[bytes] | None = None
        self._is_begun = False

    def park(self) -> str | None:
        """Move the processes' GPU state to host memory. Return None, or why this failed. After a failure, all processes run.

        Raises:
            ParkingError: Both this operation and its reversal failed.
        """
        return self._move(_PARK, _UNPARK)

    def unpark(self) -> str | None:
        """Move the processes' GPU state back. Return None, or why this failed. After a failure, all processes are parked.

        Raises:
            ParkingError: Both this operation and its reversal failed.
        """
        return self._move(_UNPARK, _PARK)

    def close(self) -> None:
        """Stop the helper process."""
        if self._helper is not None:
            self._helper.kill()
            self._helper.wait()
            for pipe in (self._helper.stdin, self._helper.stdout):
                if pipe is not None:
                    pipe.close()
            self._helper = None

    def _move(self, steps: Steps, undoing: Steps) -> str | None:
        self._is_begun = False
        try:
            self._take(steps)
        except StepError as failed:
            for attempt in range(_UNDO_ATTEMPTS if self._is_begun else 0):
                try:
                    self._take(undoing)
                    break
                except StepError as worse:
                    if attempt == _UNDO_ATTEMPTS - 1:
                        raise ParkingError(f"{failed}; the rollback failed, too: {worse}") from worse
            return str(failed)
        return None

    def _take(self, steps: Steps) -> None:
        """Perform the steps in order, each on the processes that are in its initial state. Raises StepError if one fails."""
        states = self._ask(parker.STATE, self.pids)
        for step, before, after in steps:
            if due := [pid for pid in self.pids if states[pid] == before]:
                states |= self._ask(step, due)
            if any(states[pid] != after for pid in due):
                raise StepError(f"{step} failed: the processes have unexpected driver states: {states}")
        if any(state != steps[-1][2] for state in states.values()):
            raise StepError(f"the processes have unexpected driver states: {states}")

    def _ask(self, step: str, pids: Sequence[int]) -> dict[int, int | None]:
        """Make the helper perform a step, and return the state of each process after it. Raises StepError."""
        if self._helper is not None and self._helper.poll() is not None:
            self.close()
        try:
            if self._helper is None:
                self._helper = _start()
                if reason := _read(self._helper):
                    raise StepError(reason)
            assert self._helper.stdin is not None
            self._is_begun = self._is_begun or step != parker.STATE
            self._helper.stdin.write(f"{step} {' '.join(map(str, pids))}\n".encode())
            results = dict(zip(pids, _read(self._helper), strict=True))
        except (OSError, ValueError) as error:  # the helper exited; its response is incomplete
            self.close()
            raise StepError(f"{step} failed: the helper process exited") from error
        except StepError as error:
            self.close()
            raise StepError(f"{step} failed: {error}") from error
        if failed := [f"{error} for process {pid}" for pid, (error, _) in results.items() if error]:
            raise StepError(f"{step} failed: {', '.join(failed)}")
        return {pid: state for pid, (_, state) in results.items()}


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", parker.__name__],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


def _read(helper: subprocess.Popen[bytes]) -> Any:
    """Return the helper's next line, parsed as JSON.

    Raises StepError if none arrives in time, ValueError if it is incomplete.
    """
    assert helper.stdout is not None
    end = time.monotonic() + _STEP_S
    line = b""
    while not line.endswith(b"\n"):
        if not await_readable(helper.stdout, timeout_s=max(0.0, end - time.monotonic())):
            raise StepError(f"the driver did not respond within {_STEP_S:g} s")
        if not (part := helper.stdout.read(65536)):
            break
        line += part
    return json.loads(line)
