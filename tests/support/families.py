"""Processes with their descendants, and which of them remain."""

import time
from collections.abc import Iterable

import psutil


def find_family(*pids: int) -> list[psutil.Process]:
    """Return the processes with these PIDs and all their descendants."""
    first = [psutil.Process(pid) for pid in pids]
    return list(dict.fromkeys(one for each in first for one in (each, *each.children(recursive=True))))


def has_ended(process: psutil.Process) -> bool:
    """Return whether the process has ended, waited for or not."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def remaining(family: Iterable[psutil.Process], patience_s: float = 20.0) -> list[psutil.Process]:
    """Return the processes of `family` that still run after `patience_s` seconds."""
    deadline_s = time.monotonic() + patience_s
    while (left := [one for one in family if not has_ended(one)]) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return left
