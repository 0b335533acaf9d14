"""Floor of a start that begins with an empty interpreter: the part of its duration that no preparation on this machine removes.

A served first token needs at least the import of torch and of vLLM's server closure, once, in a bare interpreter (collector
off, nothing built, process launch included), and the time from request to answer of one token on a warm server.

Both are measured in the same benchmark as the modes. The reported share is 100 * floor / first token: 100 % means that
nothing can be removed. The start of a forked or restored process, which has imported before, has no floor.
"""

from __future__ import annotations

import subprocess
import sys
import time

from coldstart.validate.launch import ModeUnavailableError
from coldstart.vllm import stock

IMPORTS = """
import gc, os
gc.disable()
import torch
{imports}
os.write(1, b"x")
os._exit(0)
"""


def imports_s(*, cuda: bool = False, timeout_s: float = 300.0) -> float:
    """Return the seconds from launch until all modules of a server are imported. Raises ModeUnavailableError."""
    code = IMPORTS.format(imports=stock.imports(cuda=cuda))
    began_s = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    output, errors = process.communicate(timeout=timeout_s)
    if output[-1:] != b"x":
        last = errors.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        raise ModeUnavailableError(f"cannot import vLLM's server modules: {last[0]}")
    return time.monotonic() - began_s
