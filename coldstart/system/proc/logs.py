"""What a failed child process said, for the error that its parent reports."""

from __future__ import annotations

import re
from pathlib import Path

from coldstart.system import secrets

_CAUSE = re.compile(r"\b\w+(?:Error|Exception): .+")
# At its end a process whose imports were cut short lists what it leaked, longer than any traceback.
_NOISE = re.compile(
    r"nanobind: | - (?:leaked (?:function|type|instance)|\.\.\. skipped) |See https://nanobind"
)
# What a validation by pydantic ends with: its own first line says only how many faults there are.
_FAULT = re.compile(r"^\s+(?:Value|Assertion) error, (.+?)(?: \[type=.*)?$", re.MULTILINE)
_END_LINES, _CAUSES = 15, 5


def words(log: Path) -> str | None:
    """The error that ended a process, as one line: the fault of a refused configuration, else the last that is named."""
    text = log.read_text(errors="replace")
    named = _FAULT.findall(text)[:1] or [match[0] for match in _CAUSE.finditer(text)][-1:]
    return secrets.text(named[0].strip()) if named else None


def end(log: Path) -> str:
    """The last lines of a log that say something, after the errors that are named further up: the first may be the cause."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if not _NOISE.match(line)]
    last = lines[-_END_LINES:]
    named = [match[0] for line in lines[:-_END_LINES] if (match := _CAUSE.search(line))]
    causes = [cause for cause in dict.fromkeys(named) if not any(cause in line for line in last)]
    return secrets.text("\n".join([*causes[:_CAUSES], *last]))
