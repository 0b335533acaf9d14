"""Wait for a condition that another thread or process brings about."""

import time
from collections.abc import Callable

from coldstart.system.proc import processes


def wait_until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Return as soon as `condition()` is true.

    The default timeout is so long that a busy machine does not reach it.

    Raises:
        AssertionError: the condition is still false after `timeout_s` seconds.
    """
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"condition is still false after {timeout_s:g} s"
        time.sleep(0.01)


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, also if its parent has not collected it: a container may have no init process."""
    return processes.read_identity(pid) is None
