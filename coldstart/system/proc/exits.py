"""Exit of a process: a description of its exit code, the error in its log, and the number of out-of-memory kills."""

from __future__ import annotations

import re
import signal
from contextlib import suppress
from pathlib import Path

from coldstart.system import secrets

# A shell reports 128 + n as the exit code of a process that was ended by signal n.
_SIGNALLED = 128


def convert_return_code(code: int) -> int:
    """Return the exit code that a shell reports (128 + n) for a return code of `subprocess` (-n after signal n)."""
    return code if code >= 0 else _SIGNALLED - code


def is_killed(code: int | None) -> bool:
    """Return whether an exit code (128 + n after signal n) means that SIGKILL ended the process."""
    return code == _SIGNALLED + signal.SIGKILL


def describe_exit(code: int) -> str:
    """Describe how a process with this exit code (128 + n after signal n) ended, as the end of a sentence."""
    with suppress(ValueError):
        number = signal.Signals(code - _SIGNALLED)
        return f"was killed by signal {number.value} ({number.name})"
    return f"exited with code {code}"


def count_oom_kills() -> int:
    """Return the number of out-of-memory kills in this process's control group (version 2), or else on the whole machine."""
    files = [Path("/proc/vmstat")]
    with suppress(OSError):  # a kernel without control groups
        group = Path("/proc/self/cgroup").read_text().rpartition("0::")[2].strip()
        files.insert(0, Path("/sys/fs/cgroup") / group.lstrip("/") / "memory.events")
    for file in files:
        with suppress(OSError, KeyError):
            return int(dict(line.split() for line in file.read_text().splitlines())["oom_kill"])
    return 0


_CAUSE = re.compile(r"\b\w+(?:Error|Exception): .+")
# At exit, a process whose imports were aborted lists its leaks, and the list is longer than any traceback.
_NOISE = re.compile(
    r"nanobind: | - (?:leaked (?:function|type|instance)|\.\.\. skipped) |See https://nanobind"
)
# The end of a pydantic validation error. Its first line has only the number of errors.
_FAULT = re.compile(r"^\s+(?:Value|Assertion) error, (.+?)(?: \[type=.*)?$", re.MULTILINE)
# Lines that mention an error which ended nothing: a log line below the level ERROR, vLLM's reference to the cause, or an
# error that a warning quotes. (Without a handler, Python prints a warning without its level.)
_MENTION = re.compile(r"\b(?:DEBUG|INFO|WARNING)\b.*|.*See root cause above.*|`\w+(?:Error|Exception): ")
_END_LINES, _CAUSES = 15, 5


def find_last_error(log: Path) -> str | None:
    """Return the last error in a log as one line, or None if there is none. Lines that merely mention an error do not count."""
    for line in reversed(log.read_text(errors="replace").splitlines()):
        if _MENTION.search(line):
            continue
        if found := _FAULT.match(line) or _CAUSE.search(line):
            return secrets.redact_text(found[found.lastindex or 0].strip())
    return None


def read_log_tail(log: Path) -> str:
    """Return the tail of a log, preceded by earlier lines with errors, because the first error is often the cause."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if not _NOISE.match(line)]
    last = lines[-_END_LINES:]
    named = [
        match[0]
        for line in lines[:-_END_LINES]
        if not _MENTION.search(line) and (match := _CAUSE.search(line))
    ]
    causes = [cause for cause in dict.fromkeys(named) if not any(cause in line for line in last)]
    return secrets.redact_text("\n".join([*causes[:_CAUSES], *last]))
