"""Floor of a start: the part of its duration that no preparation on this machine removes.

A served first token needs at least:

floor(fresh, vllm-*)      = import of torch and of vLLM's server closure, once, in a bare interpreter
                            (collector off, nothing built, process launch included);
                            + service;
floor(template, snapshot) = fork of a process with as much resident memory as the server, until the child runs
                            + service;
service                   = time from request to answer of one token, on a warm server.

All three are measured in the same benchmark as the modes. The reported share is 100 * floor / first token: 100 %
means that nothing can be removed. The first floor applies to starts that use the interpreter's imports: a start that
maps an image of the imported process can be faster, and then shows more than 100 %.
"""

from __future__ import annotations

import subprocess
import sys
import time

from coldstart.bench.stats import Summary, summarize
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
FORK = """
import mmap, os, sys, time
size, times = int(sys.argv[1]), int(sys.argv[2])
memory = mmap.mmap(-1, size)
memory.madvise(mmap.MADV_NOHUGEPAGE)
for page in range(0, size, mmap.PAGESIZE):
    memory[page] = 1
for _ in range(times):
    read, write = os.pipe()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        os.write(write, b"x")
        os._exit(0)
    os.read(read, 1)
    print(time.monotonic() - began)
    os.waitpid(child, 0)
    os.close(read)
    os.close(write)
"""
FORKS = 5
METHOD = {
    "imports": "a bare interpreter imports torch and vLLM's server and worker modules once, collector off",
    "fork": "a process with the server's resident memory forks; time until the child runs",
    "service": "time from request to answer of one token on a warm server",
    "percent_of_floor": "100 * (imports or fork, + service) / first_token_s.median",
}


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


def fork_s(resident_bytes: int) -> Summary:
    """Measure forks of a process with `resident_bytes` in small pages; return the seconds until the child runs."""
    command = [sys.executable, "-I", "-S", "-c", FORK, str(max(resident_bytes, 1)), str(FORKS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    return summarize([float(line) for line in done.stdout.split()])
