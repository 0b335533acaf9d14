"""All weights into the engine: vLLM's loaders and the libraries it takes, against ours, from the local disk.

The physics: the bytes come from the disk (cold page cache) or from memory (warm), and end in parameters of vLLM's
own model. A loader that copies needs at least

    cold:  bytes / disk
    warm:  bytes / touch + bytes / memcpy        fresh memory is faulted in, then written once

with the rates of the same run (`weights_limits`); `% of limit` is that time over the measured one. Reading and
copying may overlap, so cold is bound by the disk alone. Mapping instead of copying undercuts the warm limit, which is
the limit of a copy; its page faults come later, where the column `first pass` (one sum over all parameters) shows them.

Each measurement is a process of its own, forked from one that has imported everything, so that the figure is
loading and nothing else, and finds free memory that is backed (`weights_memory`); the order rotates by round; the
parameters of all loaders have the same digest.
Not measured, for they need a CUDA device: InstantTensor, vLLM's ipc_cache, fastsafetensors inside vLLM
(its refusal is recorded; the row `fastsafetensors-library` is the library itself feeding the same model).

    python benchmarks/weights_peers.py [--runs 5] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests")]

import weights_checkpoint  # noqa: E402
import weights_engine  # noqa: E402
import weights_limits  # noqa: E402
import weights_report  # noqa: E402
from weights_memory import Held  # noqa: E402

THREADS = {"enable_multithread_load": True, "num_threads": 8}
LOADERS: dict[str, weights_engine.Arguments] = {
    "vllm": {"load_format": "safetensors"},
    "vllm-threads": {"load_format": "safetensors", "model_loader_extra_config": THREADS},
    "vllm-prefetch": {"load_format": "safetensors", "safetensors_load_strategy": "prefetch"},
    "runai-streamer": {"load_format": "runai_streamer"},
    weights_engine.FASTSAFETENSORS: {"load_format": weights_engine.FASTSAFETENSORS},
    "fastsafetensors": {"load_format": "fastsafetensors"},
    "coldstart": {"load_format": "coldstart"},
}
HELD = 3 << 30
STATES = {"cold": weights_checkpoint.evict, "warm": weights_checkpoint.warm}


def main() -> None:
    """Measure, print the table for people and the result as one line, keep it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=list(LOADERS), choices=list(LOADERS))
    wanted = parser.parse_args()
    directory = weights_checkpoint.checkpoint()
    weights_engine.import_all()
    limits: list[dict[str, float]] = []
    samples: list[dict[str, Any]] = []
    for number in range(wanted.runs):
        limits.append(weights_limits.measure(directory))
        samples += _round(directory, wanted.only, number)
    bytes_ = weights_checkpoint.size(directory)
    result = weights_report.peers(samples, limits, bytes_)
    weights_report.finish("weights-peers", result)


def _round(directory: Path, names: list[str], number: int) -> list[dict[str, Any]]:
    found = []
    held = Held(HELD)
    shift = number % len(names)
    for name in names[shift:] + names[:shift]:
        for state, prepare in STATES.items():
            prepare(directory)
            held.take()
            # One digest per loader and state proves the bytes; it would double the time of every run.
            work = partial(weights_engine.load, directory, LOADERS[name], number == 0)
            taken = weights_engine.in_child(work, held.release)
            found.append({"loader": name, "cache": state, "round": number, **taken})
            print(_line(found[-1]), file=sys.stderr, flush=True)
    return found


def _line(sample: dict[str, Any]) -> str:
    seconds = f"{sample['load_s']:.2f} s" if "load_s" in sample else sample["error"]
    return f"round {sample['round']}: {sample['loader']}, {sample['cache']}: {seconds}"


if __name__ == "__main__":
    main()
