"""Resources that remain after many cycles of scaling to zero and back."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.host.servers import ARGS, MODELS, hosting, own_directory, spread, table
from coldstart.system import paths


def _left(process: psutil.Process) -> dict[str, int]:
    """Count the host's descriptors, child processes, and files in shared memory and temporary directories."""
    children = process.children(recursive=True)
    return {
        "descriptors": process.num_fds(),
        "processes": len(children),
        "segments": len(list(Path("/dev/shm").iterdir())),
        "runtime_files": sum(1 for _ in own_directory().rglob("*")),
        "temporary_files": sum(1 for _ in paths.temporary_dir().rglob("*")),
        "host_bytes": process.memory_info().rss,
    }


async def cycles(count: int, seconds: float) -> dict[str, Any]:
    """Start and stop six models `count` times, or as often as `seconds` allow."""
    names = [f"m{number}" for number in range(6)]
    models = {
        name: {"model": MODELS[i % 2], "args": ARGS, "idle_s": 0.0, "memory": "1GiB", "start_s": 1.0}
        for i, name in enumerate(names)
    }
    before = {"segments": len(list(Path("/dev/shm").iterdir())), "processes": _processes()}
    limits = {"memory": "6GiB", "loaders": 2, "runtime_template": False}
    deadline = time.monotonic() + seconds
    async with hosting(table(models, **limits)) as live:
        process, took, marks = psutil.Process(live.process.pid), list[float](), list[dict[str, int]]()
        while len(took) <= count and time.monotonic() < deadline:
            began = time.perf_counter()
            answers = await asyncio.gather(*(live.ask(name) for name in names))
            assert {status for status, _ in answers} == {200}, answers
            await live.wait_until(lambda said: {m["state"] for m in said["models"]} == {"stopped"})
            took.append(time.perf_counter() - began)
            marks.append(_left(process))
        said = await live.status()
    after = {"segments": len(list(Path("/dev/shm").iterdir())), "processes": _processes()}
    hosts = [str(found) for found in own_directory().glob("host-*")]
    return {
        "cycles": len(took) - 1,
        "models": len(names),
        "starts": said["starts"]["total"],
        "failed_starts": said["starts"]["failed"],
        "modes": sorted({one["mode"] for one in said["recent_starts"]}),
        "start_s": spread([one["seconds"] for one in said["recent_starts"]]),
        "cycle_s": spread(took[1:]),
        # The first cycle creates resources that are created once.
        "after_the_first": marks[0],
        "after_the_last": marks[-1],
        "before_the_host": before,
        "after_the_host": after,
        "directories_left": hosts,
    }


def _processes() -> int:
    """Processes that name this project's interpreter."""
    return sum(1 for one in _ours())


def _ours() -> Iterator[psutil.Process]:
    for one in psutil.process_iter(["cmdline"]):
        words = one.info["cmdline"] or []
        if words and sys.prefix in words[0] and ("coldstart" in " ".join(words) or "VLLM" in words[0]):
            yield one
