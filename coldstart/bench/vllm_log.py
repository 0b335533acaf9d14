"""The phases that plain vLLM reports of its own start, read from its log.

vLLM says how long some stages took, not when; what it does not say (imports, processes, the server) remains
in the difference to the first token. Compilation happens within `init engine`, so the two are told apart.
"""

from __future__ import annotations

import re

LOAD, COMPILE, INIT = "load weights", "torch.compile", "init engine without compiling"
_LOAD = re.compile(r"Loading weights took ([\d.]+) seconds")
_INIT = re.compile(r"init engine \([^)]*\) took ([\d.]+) s(?:econds)?(?: \(compilation: ([\d.]+) s)?")


def phases(log: str) -> dict[str, float]:
    """Seconds by phase; a line that vLLM did not write is a phase that is not there."""
    seconds: dict[str, float] = {}
    if loaded := _LOAD.findall(log):
        seconds[LOAD] = sum(map(float, loaded))
    if started := _INIT.search(log):
        compiling = float(started[2] or 0.0)
        seconds |= {COMPILE: compiling, INIT: float(started[1]) - compiling}
    return seconds
