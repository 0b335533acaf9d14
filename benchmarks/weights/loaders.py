"""Time of vLLM's loaders, of the libraries that it supports and of ours to load all weights from the local disk.

A loader that maps instead of copying has its page faults in `first pass` and its later copies in `usable`. Each measurement is
a fork of a process that has imported everything; the order rotates by round. Ratios are paired by round, with a 95 % interval.
In each state the host backs free memory (`benchmarks.weights.memory`):

    cold       no page of the files in memory.
    warm       all pages in memory.

Not measured because they need a CUDA device: InstantTensor, vLLM's ipc_cache, fastsafetensors inside vLLM.

Run: python -m benchmarks weights/loaders [--runs 5] [--only NAME ...]
Time: about 25 minutes
Result: weights-peers.json
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import parser
from benchmarks.weights import checkpoint, engine, report
from benchmarks.weights.memory import TouchedMemory

THREADS = {"enable_multithread_load": True, "num_threads": 8}
LOADERS: dict[str, engine.Arguments] = {
    "vllm": {"load_format": "safetensors"},
    "vllm-threads": {"load_format": "safetensors", "model_loader_extra_config": THREADS},
    "vllm-prefetch": {"load_format": "safetensors", "safetensors_load_strategy": "prefetch"},
    "runai-streamer": {"load_format": "runai_streamer"},
    engine.FASTSAFETENSORS: {"load_format": engine.FASTSAFETENSORS},
    "fastsafetensors": {"load_format": "fastsafetensors"},
    "coldstart": {"load_format": "coldstart"},
}
HELD = 3 << 30
STATES = {"cold": checkpoint.evict, "warm": checkpoint.warm}


def main() -> None:
    """Measure, print the table for people and the result as one line, keep it."""
    arguments = parser(__doc__)
    arguments.add_argument("--runs", type=int, default=5)
    arguments.add_argument("--only", nargs="*", default=list(LOADERS), choices=list(LOADERS))
    arguments.add_argument("--states", nargs="*", default=list(STATES), choices=list(STATES))
    wanted = arguments.parse_args()
    directory = checkpoint.built()
    engine.import_all()
    samples: list[dict[str, Any]] = []
    steps = [(name, state) for name in wanted.only for state in wanted.states]
    for number in range(wanted.runs):
        samples += _round(directory, steps, number)
    report.finish("weights-peers", report.peers(samples, checkpoint.size(directory)))


def _round(directory: Path, steps: list[tuple[str, str]], number: int) -> list[dict[str, Any]]:
    found = []
    held = TouchedMemory(HELD)
    shift = number * len(steps) // 5 % len(steps)
    for name, state in steps[shift:] + steps[:shift]:
        STATES[state](directory)
        held.take()
        work = partial(engine.load, directory, LOADERS[name], number == 0)
        taken = engine.run_in_child(work, held.release)
        found.append({"loader": name, "state": state, "round": number, **taken})
        print(_line(found[-1]), file=sys.stderr, flush=True)
    return found


def _line(sample: dict[str, Any]) -> str:
    seconds = f"{sample['load_s']:.2f} s" if "load_s" in sample else sample["error"]
    return f"round {sample['round']}: {sample['loader']}, {sample['state']}: {seconds}"


if __name__ == "__main__":
    main()
