"""Verify captured and restored CUDA graphs on the driver: one JSON report. Needs PyTorch, numpy and cuda-bindings.

  P0: probes. P1: ordinary captures (three times). P2, P3: capture in two layouts, classify, create the bundle.
  P4: restore in new processes (three times) and the publish gate. P5: negative tests. P6: other features.

Every phase is a process group with a time limit; the other phases run if one fails. The report is written after every phase
and has the answers that a phase gave before it crashed or ran out of time. A phase starts only if some time is left.
On a new device start with `--layers 4 --minutes 4`. `--only P0` runs the phases whose label begins with P0; `--work DIR --only
P4` uses the files of an earlier run in DIR.

Run: python -m benchmarks gpu/verify [--layers N] [--minutes N] [--out FILE]
Time: less than 10 minutes on a GPU
Result: gpu/verify-h200.json (4 layers)
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from benchmarks.common import parser
from benchmarks.gpu.answers import finish, summarize

ROOT = Path(__file__).resolve().parents[2]

Step = tuple[str, str, str, int, int]  # label, function, case, seed, seconds at most

PROBES: list[Step] = [
    # The first process reads the libraries of a new machine from its disk.
    ("P0", "probe", "streams", 9, 120),
    ("P0.map", "probe_map", "streams", 9, 60),
]
ONCE: list[Step] = [
    ("P1.1", "ordinary", "llama", 11, 90),
    ("P2", "snapshot", "llama", 1, 90),
    ("P2.more", "snapshot", "llama", 2, 90),
    ("P3", "bundle", "llama", 3, 150),
    ("P4.1", "restore", "llama", 4, 90),
    ("P4.gate", "prove", "llama", 7, 90),
    ("P5.shifted", "shifted", "llama", 8, 60),
    ("P5.missing", "missing", "llama", 8, 60),
]
AGAIN: list[Step] = [
    (f"P{number}.{i}", function, "llama", seed + i, 60)
    for i in (2, 3)
    for number, function, seed in ((1, "ordinary", 10), (4, "restore", 3))
]
FEATURES: dict[str, list[Step]] = {
    case: [
        (f"P6.{case}.{function}{seed}", function, case, seed, 75)
        for function, seed in (("snapshot", 1), ("snapshot", 2), ("bundle", 3), ("restore", 4))
    ]
    for case in ("streams", "inductor", "fp8", "random", "matmul")
}
LEAST = 5.0


@dataclass
class Check:
    """One run with its results and its time limit."""

    where: Path
    layers: int
    end: float
    out: Path | None = None
    only: str | None = None
    steps: list[dict[str, Any]] = field(default_factory=list)
    _lock: Lock = field(default_factory=Lock)

    def run(self) -> dict[str, Any]:
        """Run all phases, the most important first."""
        self.some([*PROBES, *ONCE, *AGAIN])
        with ThreadPoolExecutor(len(FEATURES)) as pool:
            list(pool.map(self.some, FEATURES.values()))
        return self.report()

    def some(self, steps: Sequence[Step]) -> None:
        """Run these phases in order."""
        for step in steps:
            if self.only is None or step[0].startswith(self.only):
                self.add(self._one(step))

    def _one(self, step: Step) -> dict[str, Any]:
        left = self.end - time.monotonic()
        if left < LEAST:
            return {"label": step[0], "ok": False, "error": "no time was left"}
        return run_step(step, self.where, self.layers, min(left, step[4]))

    def add(self, found: dict[str, Any]) -> None:
        """Add one result and write the report."""
        with self._lock:
            self.steps.append(found)
            if self.out:
                part = self.out.with_suffix(".part")
                part.write_text(json.dumps(self.report(), indent=1) + "\n")
                part.replace(self.out)
        short = {k: v for k, v in found.items() if k not in ("result", "answers")}
        print(json.dumps(short), file=sys.stderr, flush=True)

    def report(self) -> dict[str, Any]:
        """Return all results so far, with the reason if the conclusions cannot be computed."""
        try:
            concluded = conclusions(self.steps)
        except (KeyError, ValueError, TypeError, ZeroDivisionError, statistics.StatisticsError) as error:
            concluded = {"phases_failed": failed(self.steps), "not_concluded": repr(error)}
        made = {
            "layers": self.layers,
            "command": sys.argv,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        return {**made, "conclusions": concluded, "steps": self.steps}


def run_step(step: Step, where: Path, layers: int, limit: float) -> dict[str, Any]:
    """Run one phase in its own process group and end the group."""
    label, function, case, seed, _ = step
    few = min(layers, 2) if case == "matmul" else layers
    command = [sys.executable, "-X", "faulthandler", "-m", "benchmarks.gpu.verify", "--phase"]
    command += [function, case, str(seed), str(few), str(where)]
    start = time.monotonic()
    with (where / f"{label}.out").open("w+") as out, (where / f"{label}.err").open("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, cwd=ROOT, start_new_session=True)
        try:
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        err.seek(0)
        return summarize(label, code, round(time.monotonic() - start, 1), out.read(), err.read())


def phase(function: str, case: str, seed: str, layers: str, where: str) -> None:
    """Run one phase in the child process."""
    from benchmarks.gpu import phases

    finish(getattr(phases, function)(case, Path(where), int(seed), int(layers)))


def failed(steps: Sequence[dict[str, Any]]) -> list[str]:
    """Return the labels of the phases that failed."""
    return [step["label"] for step in steps if not step["ok"]]


def conclusions(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the conclusions whose phases succeeded."""
    found = {s["label"]: s["result"] for s in steps if s["ok"]}
    ordinary = [found[k] for k in found if k.startswith("P1.")]
    restored = [found[k] for k in found if k.startswith("P4.") and "hashes" in found[k]]
    out: dict[str, Any] = {"phases_failed": failed(steps)}
    if not ordinary or not restored:
        return out
    capture = [sum(o["times"][n] for n in ("warm_up_s", "capture_s", "instantiate_s")) for o in ordinary]
    restore = [sum(r["times"][n] for n in ("link_s", "first_two_s", "rest_s")) for r in restored]
    ready = [r["times"]["link_s"] + r["times"]["first_two_s"] for r in restored]
    ratios = [v["restored"] / v["captured"] for r in restored for v in r["latency_us"].values()]
    out |= {
        "warm_up_and_capture_s": capture, "restore_s": restore, "restore_to_ready_s": ready,
        "times_shorter": round(statistics.median(capture) / statistics.median(restore), 1),
        "goal_times_shorter": 20,
        "latency_ratio": [round(min(ratios), 4), round(max(ratios), 4)] if ratios else None,
        "all_equal_captured": all(r["equal_captured"] == r["graphs"] for r in restored),
        "all_equal_other_process": all(r["hashes"] == ordinary[0]["hashes"] for r in restored),
        "all_restored": all(r["restored"] == r["graphs"] for r in restored),
        "nodes": ordinary[0]["nodes"], "paper_nodes_llama2_7b": 12518,
    }  # fmt: skip
    return out


@contextlib.contextmanager
def _place(named: Path | None) -> Iterator[Path]:
    if named is not None:
        named.mkdir(parents=True, exist_ok=True)
        yield named
        return
    with tempfile.TemporaryDirectory(prefix="graphs-gpu-") as directory:
        yield Path(directory)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--phase", nargs=5, metavar=("FUNCTION", "CASE", "SEED", "LAYERS", "DIRECTORY"))
    arguments.add_argument("--layers", type=int, default=32)
    arguments.add_argument("--minutes", type=float, default=9.3)
    arguments.add_argument("--only", help="labels that start with this, e.g. P6")
    arguments.add_argument("--work", type=Path, help="keep snapshots, bundles and logs here")
    arguments.add_argument("--out", type=Path)
    options = arguments.parse_args()
    if options.phase:
        phase(*options.phase)
        return
    with _place(options.work) as where:
        end = time.monotonic() + 60 * options.minutes
        report = Check(where, options.layers, end, options.out, options.only).run()
    print(json.dumps({"conclusions": report["conclusions"]}))
    sys.exit(1 if report["conclusions"]["phases_failed"] else 0)


if __name__ == "__main__":
    main()
