"""Lower bound (floor) of the duration of a start in a new interpreter, which no preparation on this machine can reduce.

A first token needs at least the import of torch and of all modules of vLLM's server (in a bare interpreter without garbage
collection, process launch included) and the response time of a one-token request on a warm server.

Both are measured in the same benchmark as the modes. The reported percentage is 100 * floor / first token; 100 % means
that the start cannot be shortened. Forked and restored processes have imported before and have no floor.
"""

from __future__ import annotations

import subprocess
import sys
import time

from coldstart.validate.launch import ModeUnavailableError
from coldstart.vllm import stock

IMPORT_SCRIPT = """
import gc, os
gc.disable()
import torch
{imports}
os.write(1, b"x")
os._exit(0)
"""


def measure_import_seconds(*, cuda: bool = False, timeout_s: float = 300.0) -> float:
    """Return the seconds from process launch until all server modules are imported. Raises ModeUnavailableError."""
    code = IMPORT_SCRIPT.format(imports=stock.imports(cuda=cuda))
    launched_s = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    output, errors = process.communicate(timeout=timeout_s)
    if output[-1:] != b"x":
        last = errors.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        raise ModeUnavailableError(f"cannot import vLLM's server modules: {last[0]}")
    return time.monotonic() - launched_s
