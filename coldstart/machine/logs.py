"""What a failed child process said, for the error that its parent reports."""

from __future__ import annotations

import re
from pathlib import Path

from coldstart.machine import secrets

_CAUSE = re.compile(r"\b\w+(?:Error|Exception): .+")
# At its end a process whose imports were cut short lists what it leaked, longer than any traceback.
_NOISE = re.compile(
    r"nanobind: | - (?:leaked (?:function|type|instance)|\.\.\. skipped) |See https://nanobind"
)
_END_LINES, _CAUSES = 15, 5


def end(log: Path) -> str:
    """The last lines of a log that say something, after the errors that are named further up: the first may be the cause."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if not _NOISE.match(line)]
    last = lines[-_END_LINES:]
    named = [match[0] for line in lines[:-_END_LINES] if (match := _CAUSE.search(line))]
    causes = [cause for cause in dict.fromkeys(named) if not any(cause in line for line in last)]
    return secrets.text("\n".join([*causes[:_CAUSES], *last]))
