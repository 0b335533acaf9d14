"""Checkpoint and restore a CUDA process by the driver: return codes, seconds and GB/s of each step, equal bytes.

A child fills device memory, captures a CUDA graph over a part of it and hashes a replay. This process locks the
child, checkpoints its device memory into host memory, restores it and unlocks it. The child then replays the same
graph and hashes again. Two sizes tell a fixed cost from a cost per GiB. A third child does all steps to itself.
The report is written after every case.

Run: python -m benchmarks gpu/checkpoint [--gib N] [--out FILE]
Time: less than 60 s on a GPU with a driver of 570 or newer
Result: gpu/checkpoint-h200.json
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import parser
from coldstart.graphs.cuda.driver import bindings, call, primary_context

ROOT = Path(__file__).resolve().parents[2]
CHUNK = 1 << 28
LOCK_MS = 10_000
STEPS = ("Lock", "Checkpoint", "Restore", "Unlock")


def attempt(work: Callable[[], Any]) -> Any:
    """Return the result of `work` or the text of its exception."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - a probe reports whatever happens
        return f"{type(error).__name__}: {error}"


def drive(pid: int, gib: float, free: Callable[[], Any] | None) -> Iterator[dict[str, Any]]:
    """Yield the outcome of each step on a process; later steps run even if one fails, so all codes are known.

    `free` returns the device's free bytes. It is None in the process itself, where a locked driver would block.
    """
    d = bindings()
    yield _show({"step": "before", "state": _state(pid), "free": free and free()})
    for step in STEPS:
        start = time.perf_counter()
        code = _code(step, pid)
        seconds = time.perf_counter() - start
        found = {"step": step.lower(), "code": code, "seconds": round(seconds, 4), "state": _state(pid)}
        if step in ("Checkpoint", "Restore") and code == d.CUresult.CUDA_SUCCESS.name:
            found["gb_per_s"] = round(gib * 2**30 / 1e9 / seconds, 2)
        yield _show(found | {"free": free and free()})


def _show(step: dict[str, Any]) -> dict[str, Any]:
    """Print a step at once: the next one may block."""
    print(json.dumps(step), file=sys.stderr, flush=True)
    return step


def _code(step: str, pid: int) -> str:
    """Return the name of the driver's return code, or why the driver could not be asked."""
    d = bindings()
    arguments = None
    if step == "Lock":
        arguments = d.CUcheckpointLockArgs()
        arguments.timeoutMs = LOCK_MS
    try:
        return str(getattr(d, f"cuCheckpointProcess{step}")(pid, arguments)[0].name)
    except (RuntimeError, AttributeError) as error:  # the driver or the bindings lack the entry point
        return f"{type(error).__name__}: {error}"


def _state(pid: int) -> str:
    try:
        error, state = bindings().cuCheckpointProcessGetState(pid)
        return str((state if not int(error) else error).name)
    except (RuntimeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"


class Child:
    """A process that answers each command with lines of JSON; the last line of an answer has "done"."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        self.pid, self._rest = self._process.pid, b""

    def ask(self, command: str, seconds: float) -> list[dict[str, Any]]:
        """Return the lines of the answer; without a last line, one that names the failure."""
        assert self._process.stdin is not None
        end, lines = time.monotonic() + seconds, list[dict[str, Any]]()
        with contextlib.suppress(OSError):
            self._process.stdin.write(command.encode() + b"\n")
            self._process.stdin.flush()
        while not lines or "done" not in lines[-1]:
            line = self._line(end)
            if line is None:
                return [*lines, {"error": f"{command}: no answer; exit code {self._process.poll()}"}]
            with contextlib.suppress(ValueError):
                lines.append(json.loads(line))
        return lines

    def _line(self, end: float) -> bytes | None:
        assert self._process.stdout is not None
        output = self._process.stdout.fileno()
        while b"\n" not in self._rest:
            if not select.select([output], [], [], max(0.0, end - time.monotonic()))[0]:
                return None
            data = os.read(output, 1 << 16)
            if not data:
                self._process.wait()
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def end(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait()


def examine(child: Child, gib: float, own: bool, free: Callable[[], Any], seconds: float) -> dict[str, Any]:
    """Return the outcome of one case: the steps, and whether the replay gives the same bytes as before."""
    end = time.monotonic() + seconds
    case: dict[str, Any] = {"gib": gib, "own_process": own, "steps": []}
    before = child.ask(f"fill {gib}", end - time.monotonic())
    if "error" in before[-1]:
        return case | {"error": before[-1]["error"]}
    if own:
        case["steps"] = child.ask(f"own {gib}", end - time.monotonic())
    else:
        case["steps"] = list(drive(child.pid, gib, free))
    after = child.ask("again", end - time.monotonic())
    case |= {"before": before[-1], "after": after[-1]}
    return case | {"equal": before[-1].get("hash") == after[-1].get("hash") is not None}


def serve() -> None:
    """Answer the commands of the parent: fill, own, again."""
    import torch

    torch.cuda.init()
    replay: Callable[[], str] | None = None
    for line in sys.stdin:
        command, *rest = line.split()
        if command == "fill":
            replay = _prepare(float(rest[0]))
        if command == "own":
            for step in drive(os.getpid(), float(rest[0]), None):
                print(json.dumps(step), flush=True)
            print(json.dumps({"done": True}), flush=True)
        elif replay is not None:
            start = time.perf_counter()
            value = replay()
            seconds = round(time.perf_counter() - start, 4)
            print(json.dumps({"done": True, "hash": value, "seconds": seconds}), flush=True)


def _prepare(gib: float) -> Callable[[], str]:
    """Fill memory and capture a graph; return a function that replays it and hashes its output and all memory."""
    import torch
    from benchmarks.gpu.workloads import checksum

    source = torch.Generator(device="cuda").manual_seed(5)
    chunks = [
        torch.randint(1 << 62, (CHUNK // 8,), generator=source, device="cuda")
        for _ in range(max(1, round(gib * 2**30 / CHUNK)))
    ]
    a = torch.randn((2048, 2048), generator=source, device="cuda").bfloat16()
    out = torch.zeros_like(a)

    def run() -> None:
        out.copy_((a @ a) + (chunks[-1][: a.numel()].view_as(a) % 7).bfloat16())

    run()  # before the capture, in which cuBLAS cannot create its handle
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def replay() -> str:
        out.zero_()
        graph.replay()
        sums = torch.stack([checksum(chunk) for chunk in chunks])
        return hashlib.sha256(
            out.view(torch.int16).cpu().numpy().tobytes() + sums.cpu().numpy().tobytes()
        ).hexdigest()

    return replay


def free_bytes() -> int:
    """Return the free bytes of the device; all processes count."""
    return int(call(bindings().cuMemGetInfo)[0])


def run(
    cases: Sequence[tuple[float, bool]], command: Sequence[str], out: Path | None, seconds: float
) -> dict[str, Any]:
    """Run the cases one after the other; their children start together, because they import PyTorch first."""
    end = time.monotonic() + seconds
    report: dict[str, Any] = {
        "driver": attempt(lambda: call(bindings().cuDriverGetVersion)),
        "context": attempt(lambda: str(primary_context())),  # restoring needs an initialized driver
        "cases": [],
    }
    children = [Child(command) for _ in cases]
    try:
        for child, (gib, own) in zip(children, cases, strict=True):
            left = max(1.0, end - time.monotonic())
            report["cases"].append(examine(child, gib, own, lambda: attempt(free_bytes), left))
            child.end()
            if out is not None:
                out.write_text(json.dumps(report, indent=1) + "\n")
    finally:
        for child in children:
            child.end()
    return report


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--gib", type=float, default=8.0, help="size of the first case (default: 8)")
    arguments.add_argument("--seconds", type=float, default=60.0, help="limit of all cases (default: 60)")
    arguments.add_argument("--out", type=Path)
    arguments.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.child:
        serve()
        return
    command = [sys.executable, "-X", "faulthandler", "-m", "benchmarks.gpu.checkpoint", "--child"]
    cases = [(1.0, False), (options.gib, False), (1.0, True)]
    report = run(cases, command, options.out, options.seconds)
    print(json.dumps(report))
    sys.exit(0 if all(case.get("equal") for case in report["cases"]) else 1)


if __name__ == "__main__":
    main()
