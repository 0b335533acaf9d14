"""The GPU check: PyTorch and cuda-bindings only, one command of under ten minutes, one JSON report.

  P0 probes   P1 the ordinary way (three times)   P2, P3 capture in layouts that differ, classify, bundle
  P4 restore where nothing ran before (three times) and the publish gate   P5 negatives   P6 other features
Every phase is a process of its own; the failure of one leaves the others running, and the report says which
failed and why.  Ceiling: capture cannot be beaten below the driver's own time to build and instantiate.
  python benchmarks/gpu/verify.py --out benchmarks/results/graphs-gpu.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

Step = tuple[str, str, str, int]  # label, function, case, seed

LLAMA: list[Step] = [
    ("P0", "probe", "llama", 9),
    *((f"P1.{i}", "ordinary", "llama", 10 + i) for i in (1, 2, 3)),
    ("P2", "snapshot", "llama", 1),
    ("P2.more", "snapshot", "llama", 2),
    ("P3", "bundle", "llama", 3),
    *((f"P4.{i}", "restore", "llama", 3 + i) for i in (1, 2, 3)),
    ("P4.gate", "prove", "llama", 7),
    ("P5.missing", "missing", "llama", 8),
    ("P5.shifted", "shifted", "llama", 8),
]
FEATURES: list[Step] = [
    (f"P6.{case}.{function}", function, case, seed)
    for case in ("streams", "inductor", "fp8", "random", "matmul")
    for function, seed in (("snapshot", 1), ("snapshot", 2), ("bundle", 3), ("restore", 4))
]


def run_step(step: Step, where: Path, layers: int, limit: float) -> dict[str, Any]:
    """One phase in its own process."""
    label, function, case, seed = step
    few = min(layers, 2) if case == "matmul" else layers
    command = [sys.executable, __file__, "--phase", function, case, str(seed), str(few), str(where)]
    start = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"label": label, "ok": False, "error": f"no answer in {limit:.0f} s"}
    seconds = round(time.monotonic() - start, 1)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"label": label, "ok": False, "seconds": seconds, "error": done.stderr[-1500:]}
    return {"label": label, "ok": True, "seconds": seconds, "result": json.loads(lines[-1])}


def phase(function: str, case: str, seed: str, layers: str, where: str) -> None:
    """The child's side."""
    import phases

    print(json.dumps(getattr(phases, function)(case, Path(where), int(seed), int(layers))))


def conclusions(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """The goals, from whatever succeeded; absent where a phase that they need failed."""
    found = {s["label"]: s["result"] for s in steps if s["ok"]}
    ordinary = [found[k] for k in found if k.startswith("P1.")]
    restored = [found[k] for k in found if k.startswith("P4.") and "hashes" in found[k]]
    out: dict[str, Any] = {"phases_failed": [s["label"] for s in steps if not s["ok"]]}
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--phase", nargs=5, metavar=("FUNCTION", "CASE", "SEED", "LAYERS", "DIRECTORY"))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--minutes", type=float, default=9.5)
    parser.add_argument("--only", help="labels that start with this, e.g. P6")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.phase:
        phase(*options.phase)
        return
    report = check(options.layers, options.minutes, options.only)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({"conclusions": report["conclusions"]}))
    sys.exit(1 if report["conclusions"]["phases_failed"] else 0)


def check(layers: int, minutes: float, only: str | None) -> dict[str, Any]:
    """All phases, one after another, as long as the time lasts."""
    end, steps = time.monotonic() + 60 * minutes, []
    wanted = [s for s in (*LLAMA, *FEATURES) if only is None or s[0].startswith(only)]
    with tempfile.TemporaryDirectory() as directory:
        for step in wanted:
            left = end - time.monotonic()
            if left < 5:
                steps.append({"label": step[0], "ok": False, "error": "no time was left"})
                continue
            steps.append(run_step(step, Path(directory), layers, min(left, 180)))
            print(
                json.dumps({k: v for k, v in steps[-1].items() if k != "result"}), file=sys.stderr, flush=True
            )
    return {"layers": layers, "conclusions": conclusions(steps), "steps": steps}


if __name__ == "__main__":
    main()
