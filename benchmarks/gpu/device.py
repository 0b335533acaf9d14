"""Questions about one device that `gpu/plan` asks in processes of their own; the last line of each is its answer as JSON.

Memory, copies and the driver's steps are those of coldstart's own modules. Sizes are in GiB, in a rehearsal in 4 MiB.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from mmap import MADV_HUGEPAGE, MADV_NOHUGEPAGE
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from coldstart.graphs.cuda.driver import call
from coldstart.system.devices import parker
from coldstart.system.proc.mappings import LIBC, Region, map_memory

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
PAGEABLE, SMALL, HUGE = "pageable memory", "registered 4 KiB pages", "registered 2 MiB pages"
ARENA, DRIVER = "registered copy of the sleep backend", "memory that the driver pins"
KINDS = (PAGEABLE, SMALL, HUGE, ARENA, DRIVER)
UNIT = 1 << 22 if "CUDA_FAKE_CHECKPOINTS" in os.environ else 1 << 30
Answers = Iterator[dict[str, Any]]


def time_calls(*calls: Callable[[], object]) -> float:
    """Return the seconds that calls take, one after the other."""
    began = time.perf_counter()
    for one in calls:
        one()
    return round(time.perf_counter() - began, 5)


def hold(device: str, host: str, kind: str) -> Answers:
    """Copy host memory of a kind to memory of the device, which is mapped as vLLM's allocator does; again at stdin's end.

    Yield seconds to touch and to register the host's memory, its KiB in huge pages, GB/s, and whether the bytes came back.
    """
    from coldstart.vllm.sleep.device import WEIGHTS, CudaWeights
    from coldstart.vllm.sleep.memory import ArenaPool

    table, word, found = dict[int, Any](), ctypes.c_uint64(), dict[str, Any]()
    backend, size, length = CudaWeights(table), int(float(host) * UNIT), int(float(device) * UNIT)
    region = Region(int(call(backend.d.cuMemAddressReserve, length, 0, 0, 0)), length)
    handle = (0, region.size, region.address, ctypes.addressof(word))
    table[region.address] = SimpleNamespace(tag=WEIGHTS, is_asleep=True, handle=handle)
    backend.map(region)
    if kind == DRIVER:
        source = int(call(backend.d.cuMemHostAlloc, size, 0))
    elif kind == ARENA:
        source = ArenaPool.open_shared().create_arena("m", size).address
    else:
        source = map_memory(size)
        LIBC.madvise(source, size, MADV_HUGEPAGE if kind == HUGE else MADV_NOHUGEPAGE)
    found["touch_s"] = time_calls(lambda: ctypes.memset(source, 7, size))
    pages = re.findall(r"(?:AnonHuge|ShmemPmd)\w+: +(\d+)", Path("/proc/self/smaps_rollup").read_text())
    found["huge_kib"] = sum(map(int, pages))
    if kind in (SMALL, HUGE, ARENA):
        found["register_s"] = time_calls(lambda: backend.pin(source, size))
    part = region._replace(size=min(region.size, size))
    back = map_memory(part.size)

    def copy() -> float:
        seconds = time_calls(lambda: backend.write(part, source), backend.synchronize)
        return round(part.size / 1e9 / seconds, 2)

    found["gb_per_s"] = [copy(), copy()]
    yield found
    sys.stdin.read()
    backend.read(part, back)
    backend.synchronize()
    ends = map(ctypes.c_void_p, (back, source))
    found["equal"] = LIBC.memcmp(*ends, ctypes.c_size_t(part.size)) == 0
    found["pinned_for_the_driver"] = not int(backend.d.cuMemHostGetFlags(source)[0])
    yield found | {"gb_per_s_later": copy()}


def park(*words: str) -> Answers:
    """Have the driver move what a process holds on the device to the host and back; yield the seconds of each step."""
    command = [sys.executable, "-m", "benchmarks.gpu.device", "hold", *words]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    found: dict[str, Any] = {"huge_pages": HUGE_PAGES.read_text()}
    found["before"] = json.loads(holder.stdout.readline())
    for step in parker.STEPS:
        driver, began = parker.Driver(), time.perf_counter()
        error, state = driver.perform(step, holder.pid)
        found[step] = {"seconds": round(time.perf_counter() - began, 4), "error": error, "state": state}
    if any(found[step]["error"] for step in parker.STEPS):
        holder.kill()  # it may be locked, and would not answer
    yield found | {"after": json.loads(holder.communicate()[0] or "null")}


def inspect_fork(*words: str) -> Answers:
    """Yield what a process has open after vLLM's configuration, and the seconds from a fork to the child's context."""
    from coldstart.vllm.engine import server, template

    server.import_runtime()
    server.import_engine()
    arguments, began = server.parse_args(words)[0], time.perf_counter()
    config = server.create_config(arguments)
    configure_s = round(time.perf_counter() - began, 2)
    import_s = time_calls(lambda: server.import_gpu_engine(config))
    opened = {os.path.realpath(one) for one in Path("/proc/self/fd").iterdir()}
    found = {
        "configure_s": configure_s, "import_gpu_engine_s": import_s, "cuda_initialized": template.is_cuda_initialized(),
        "threads": Counter(one.read_text().strip() for one in Path("/proc/self/task").glob("*/comm")),
        "device_files": sorted(one for one in opened if one.startswith("/dev/nvidia")),
    }  # fmt: skip
    yield found
    began = time.perf_counter()
    with get_context("fork").Pool(1) as pool:
        pool.apply(exec, ("from coldstart.graphs.cuda import driver; driver.primary_context()",))
        yield found | {"fork_and_context_s": round(time.perf_counter() - began, 4)}


def time_imports(switch: str) -> Answers:
    """Import what a server imports, with the collector "enable"d or "disable"d; yield seconds, also of collections."""
    marks, packages = list[float](), Counter[str]()
    getattr(gc, switch)()
    gc.callbacks.append(lambda phase, _: marks.append(time.perf_counter() * (1 if phase == "stop" else -1)))
    from coldstart.vllm.engine import server

    seconds = time_calls(server.import_runtime, server.import_engine)
    # `python -X importtime` writes the time of each module to standard error, which is a file here.
    log = Path("/proc/self/fd/2").read_text(errors="replace")
    for spent, package in re.findall(r"^import time: +(\d+) \|[^|]*\| +(\w+)", log, re.MULTILINE):
        packages[package] += int(spent)
    by_package = {package: round(spent / 1e6, 3) for package, spent in packages.most_common(12)}
    yield {"seconds": seconds, "collections_s": round(sum(marks), 3), "by_package_s": by_package}


if __name__ == "__main__":
    for answer in globals()[sys.argv[1]](*sys.argv[2:]):
        print(json.dumps(answer), flush=True)
