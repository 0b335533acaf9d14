"""Phases that stock vLLM reports about its own start, read from its log.

vLLM logs how long some stages took, not when. Other stages (imports, processes, the server) are the difference to the
first token. Compilation is part of `init engine`, so it is subtracted there.
"""

from __future__ import annotations

import re

LOAD, COMPILE, INIT = "load weights", "torch.compile", "init engine without compiling"
_LOAD = re.compile(r"Loading weights took ([\d.]+) seconds")
_INIT = re.compile(r"init engine \([^)]*\) took ([\d.]+) s(?:econds)?(?: \(compilation: ([\d.]+) s)?")


def phases(log: str) -> dict[str, float]:
    """Return seconds by phase; phases without a log line are omitted."""
    seconds: dict[str, float] = {}
    if loaded := _LOAD.findall(log):
        seconds[LOAD] = sum(map(float, loaded))
    if started := _INIT.search(log):
        compiling = float(started[2] or 0.0)
        seconds |= {COMPILE: compiling, INIT: float(started[1]) - compiling}
    return seconds
