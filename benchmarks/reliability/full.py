"""Starts on full file systems: a tmpfs of a page or two in the place of each directory that a start writes to."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.reliability.run import VLLM, Run, answering, serving

MODES = ("fresh", "template-engine")


def full(run: Run, count: int) -> None:
    """Each directory in turn, in both modes, `count` times over: a server answers; fallbacks are counted.

    vLLM itself needs shared memory: a start that ends for want of it must name the place.
    """
    run.command("materialize", "tiny-llama", "--", *VLLM)
    home, cache = run.machine.root / "home", run.machine.cache
    weights = str(next((cache / "models").glob("*/tiny-llama")))
    places = {
        "shared memory": Path("/dev/shm"),
        "temporary files": run.machine.root / "tmp",
        "sockets": run.machine.root / "run",
        "state": home / "state" / "coldstart",
        "unpacked sections": cache / "unpacked",
        "vLLM's caches": cache / "vllm",
        "plans of weights": cache / "weights",
    }
    run.command("template", "start", "tiny-llama", "--level", "engine", "--", *VLLM)
    for number in range(count):
        for name, place in places.items():
            for mode in MODES:
                if run.over:
                    return
                options = ("--weights-from", weights) if number % 2 else ()
                with _full(place):
                    _start(run, name, place, mode, options)
    run.command("prefetch", "stop")
    run.command("template", "stop", "--force")


@contextmanager
def _full(place: Path) -> Iterator[None]:
    """`place` hidden by a file system with copies of its small files, and without a free byte or inode."""
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    small = [file for file in place.rglob("*") if file.is_file() and file.stat().st_size < 1 << 16]
    kept = [(file.relative_to(place), file.read_bytes(), file.stat().st_mode) for file in small]
    mode = "1777" if place == Path("/dev/shm") else "0700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size=1m,mode={mode}", "tmpfs", str(place)], check=True)
    for name, data, permissions in kept:
        (place / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        (place / name).write_bytes(data)
        (place / name).chmod(permissions)
    with suppress(OSError), (place / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with suppress(OSError):
        for number in range(1 << 20):  # inodes
            (place / f"filler-{number}").touch()
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def _start(run: Run, name: str, place: Path, mode: str, options: tuple[str, ...]) -> None:
    with serving(run, "tiny-llama", "--mode", mode, *options) as one:
        report = one.await_ready()
        if report is None and f"{place} has" in one.log.read_text(errors="replace"):
            run.counts[f"{name} full, asked for {mode}: ended, the place named"] += 1
            return
        if (report := answering(run, one, f"{name} full, {mode} {options}")) is None:
            return
        run.counts[f"ready: {name} full"] += 1
        for step in report["fallbacks"]:
            run.counts[f"{name} full: {step['section']} fell back"] += 1
        run.counts[f"{name} full, asked for {mode}: {report['mode']}"] += 1
        if "Traceback" in one.log.read_text(errors="replace"):
            run.fail(f"{name} full, {mode}: a traceback in the log: {json.dumps(report['fallbacks'])[:200]}")
        one.end()
