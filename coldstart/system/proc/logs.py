"""Find the error in a failed child process's log, for the error that its parent reports."""

from __future__ import annotations

import re
from pathlib import Path

from coldstart.system import secrets

_CAUSE = re.compile(r"\b\w+(?:Error|Exception): .+")
# At exit, a process whose imports were aborted lists its leaks, which is longer than any traceback.
_NOISE = re.compile(
    r"nanobind: | - (?:leaked (?:function|type|instance)|\.\.\. skipped) |See https://nanobind"
)
# The end of a pydantic validation error. Its first line has only the number of errors.
_FAULT = re.compile(r"^\s+(?:Value|Assertion) error, (.+?)(?: \[type=.*)?$", re.MULTILINE)
# Lines that mention an error which ended nothing: a log line below the level ERROR, vLLM's reference to the cause, or an
# error that a warning quotes. (Without a handler, Python prints a warning without its level.)
_MENTION = re.compile(r"\b(?:DEBUG|INFO|WARNING)\b.*|.*See root cause above.*|`\w+(?:Error|Exception): ")
_END_LINES, _CAUSES = 15, 5


def words(log: Path) -> str | None:
    """Return the error that ended a process as one line: the last error in the log, without mere mentions of errors."""
    for line in reversed(log.read_text(errors="replace").splitlines()):
        if _MENTION.search(line):
            continue
        if found := _FAULT.match(line) or _CAUSE.search(line):
            return secrets.text(found[found.lastindex or 0].strip())
    return None


def end(log: Path) -> str:
    """Return the tail of a log, preceded by earlier error lines: the first error is often the cause."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if not _NOISE.match(line)]
    last = lines[-_END_LINES:]
    named = [match[0] for line in lines[:-_END_LINES] if (match := _CAUSE.search(line))]
    causes = [cause for cause in dict.fromkeys(named) if not any(cause in line for line in last)]
    return secrets.text("\n".join([*causes[:_CAUSES], *last]))
