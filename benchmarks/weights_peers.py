"""All weights into the engine: vLLM's loaders and the libraries it takes, against ours, from the local disk.

The physics: the bytes come from the disk (cold page cache) or from memory (warm), and end in parameters of vLLM's
own model. A loader that copies needs at least

    cold:  bytes / disk
    warm:  bytes / touch + bytes / memcpy        fresh memory is faulted in, then written once

with the rates of the same run (`weight_path.limits`); `% of limit` is that time over the measured one. Reading and
copying may overlap, so cold is bound by the disk alone. Mapping instead of copying undercuts the warm limit, which is
the limit of a copy; page faults that come later show in the column `first pass` (one sum over all parameters), copies
that come later in `usable` (vLLM's post-processing, which packs most weights anew, included).

Each measurement is a process of its own, forked from one that has imported everything, so that the figure is
loading and nothing else; the order rotates by round. In the first round the parameters are looked at (`first pass`, and a
digest that all loaders share), in the others `usable` is taken. Ratios are paired by round, with their 95 % interval. States:

    cold       no page of the files in memory; free memory is backed by the host (`weight_path.memory`)
    warm       all pages in memory; free memory is backed
    returned   warm, but the host has taken free memory back: what a start on an idle virtual machine finds
    resident   the prefetcher has the weights already: what a second worker of the node finds (ours alone)

Not measured, for they need a CUDA device: InstantTensor, vLLM's ipc_cache, fastsafetensors inside vLLM
(its refusal is recorded; the row `fastsafetensors-library` is the library itself feeding the same model).

    python benchmarks/weights_peers.py [--runs 5] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests")]

from support import range_control  # noqa: E402
from weight_path import checkpoint, engine, limits, node, report  # noqa: E402
from weight_path.memory import RETURNED_S, Held  # noqa: E402

from coldstart.weights.prefetch import client  # noqa: E402

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
# Ours and the two peers that share its pages' fate; the others differ no more there than where memory is backed.
RETURNED = ("vllm", "vllm-prefetch", "coldstart")
State = Callable[[Path], AbstractContextManager[dict[str, str]]]


@contextmanager
def cold(directory: Path) -> Iterator[dict[str, str]]:
    """No page of the files is in memory."""
    checkpoint.evict(directory)
    yield {}


@contextmanager
def warm(directory: Path) -> Iterator[dict[str, str]]:
    """All pages of the files are."""
    checkpoint.warm(directory)
    yield {}


@contextmanager
def resident(directory: Path) -> Iterator[dict[str, str]]:
    """The prefetcher has fetched everything, over HTTP."""
    asked = node.plan(directory)
    with range_control.running(directory) as server:
        try:
            with client.attach(server.url, json.loads(asked.read_text()), directory=node.sockets()) as held:
                held.complete()
                yield {
                    **node.streaming(server.url, asked),
                    "XDG_RUNTIME_DIR": str(node.runtime()),
                }
        finally:
            node.stop_prefetcher(node.runtime())


STATES: dict[str, State] = {"cold": cold, "warm": warm, "returned": warm, "resident": resident}


def main() -> None:
    """Measure, print the table for people and the result as one line, keep it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=list(LOADERS), choices=list(LOADERS))
    parser.add_argument("--states", nargs="*", default=list(STATES), choices=list(STATES))
    wanted = parser.parse_args()
    directory = checkpoint.built()
    engine.import_all()
    ceilings: list[dict[str, float]] = []
    samples: list[dict[str, Any]] = []
    steps = [(name, state) for name in wanted.only for state in wanted.states if _sensible(name, state)]
    for number in range(wanted.runs):
        ceilings.append(limits.measure(directory))
        samples += _round(directory, steps, number)
    size = checkpoint.size(directory)
    report.finish("weights-peers", report.peers(samples, ceilings, size))


def _sensible(name: str, state: str) -> bool:
    """Which states a loader is measured in."""
    return {"returned": name in RETURNED, "resident": name == report.OURS}.get(state, True)


def _round(directory: Path, steps: list[tuple[str, str]], number: int) -> list[dict[str, Any]]:
    found = []
    held = Held(HELD)
    shift = number * len(steps) // 5 % len(steps)
    for name, state in steps[shift:] + steps[:shift]:
        with STATES[state](directory) as environment:
            held.take()
            work = partial(_load, directory, name, environment, number == 0)
            taken = engine.in_child(work, partial(_free, held, state))
        found.append({"loader": name, "state": state, "round": number, **taken})
        print(_line(found[-1]), file=sys.stderr, flush=True)
    return found


def _load(
    directory: Path, name: str, environment: Mapping[str, str], look: bool, ready: engine.Ready
) -> dict[str, Any]:
    os.environ.update(environment)
    # Where the prefetcher is meant, there are no files to fall back to unnoticed.
    model = node.bare(directory) if environment else directory
    return engine.load(model, LOADERS[name], look, ready)


def _free(held: Held, state: str) -> None:
    held.release()
    if state == "returned":
        time.sleep(RETURNED_S)


def _line(sample: dict[str, Any]) -> str:
    seconds = f"{sample['load_s']:.2f} s" if "load_s" in sample else sample["error"]
    return f"round {sample['round']}: {sample['loader']}, {sample['state']}: {seconds}"


if __name__ == "__main__":
    main()
