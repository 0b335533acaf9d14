"""Helper process that suspends and restores the CUDA state of other processes with the driver's checkpoint functions.

It initializes the driver once and has no context, so it uses no device memory. For each line `STEP PID...` on its
standard input, it prints one line of JSON: for each PID, the name of the driver's error (empty after a success) and the
state of the process (None if the driver does not report it). It exits at the end of its input. `parking` decides on the
steps.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

LIBRARY = "libcuda.so.1"
STATE, LOCK = "state", "lock"
STEPS = {LOCK: "Lock", "checkpoint": "Checkpoint", "restore": "Restore", "unlock": "Unlock"}
LOCK_MS = 10_000


class LockArguments(ctypes.Structure):
    """CUcheckpointLockArgs of cuda.h."""

    _fields_ = (
        ("timeout_ms", ctypes.c_uint),
        ("reserved0", ctypes.c_uint),
        ("reserved1", ctypes.c_uint64 * 7),
    )


class Driver:
    """Functions of the CUDA driver that act on other processes. Raises OSError or AttributeError if the driver lacks them."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(LIBRARY)
        self._calls: dict[str, Callable[..., int]] = {
            step: getattr(self._library, f"cuCheckpointProcess{name}") for step, name in STEPS.items()
        }
        if error := self._name(self._library.cuInit(0)):
            raise OSError(f"cannot initialize the CUDA driver: {error}")

    def perform(self, step: str, pid: int) -> tuple[str, int | None]:
        """Perform one step on one process.

        Return the name of the error (empty if there is none) and the state after the step.
        """
        error, state = "", ctypes.c_int()
        if step != STATE:
            arguments = ctypes.byref(LockArguments(LOCK_MS)) if step == LOCK else None
            error = self._name(self._calls[step](pid, arguments))
        unknown = self._name(self._library.cuCheckpointProcessGetState(pid, ctypes.byref(state)))
        return error or (unknown if step == STATE else ""), None if unknown else state.value

    def _name(self, code: int) -> str:
        text = ctypes.c_char_p()
        if code and self._library.cuGetErrorName(code, ctypes.byref(text)):
            return f"CUDA error {code}"
        return (text.value or b"").decode()


def main() -> None:
    """Print as JSON why the driver is unusable, or "". Then perform the step of each line of stdin, and print its results."""
    try:
        driver = Driver()
    except (OSError, AttributeError) as error:
        print(json.dumps(str(error)), flush=True)
        return
    print(json.dumps(""), flush=True)
    for line in sys.stdin:
        step, *pids = line.split()
        # All ranks in parallel, because each call copies the memory of one device.
        with ThreadPoolExecutor(len(pids)) as pool:
            results = list(pool.map(driver.perform, [step] * len(pids), map(int, pids)))
        print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
