"""Time of vLLM's loaders, of the libraries that it supports and of ours to load all weights from the local disk.

A loader that maps instead of copying has its page faults in `first pass` and its later copies in `usable`. Each measurement is
a fork of a process that has imported everything; the order rotates by round. Ratios are paired by round, with a 95 % interval.
In each state the host backs free memory (`benchmarks.weights.memory`):

    cold       no page of the files in memory.
    warm       all pages in memory.
    resident   the prefetcher has the weights, as for a second worker of the node (ours only).

Not measured because they need a CUDA device: InstantTensor, vLLM's ipc_cache, fastsafetensors inside vLLM.

Run: python -m benchmarks weights/loaders [--runs 5] [--only NAME ...]
Time: about 25 minutes
Result: weights-peers.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.weights import checkpoint, engine, file_server, node, report
from benchmarks.weights.memory import TouchedMemory
from coldstart.weights.prefetch import client

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
    with file_server.running(directory) as server:
        try:
            with client.attach(server.url, json.loads(asked.read_text()), directory=node.sockets()) as held:
                held.complete()
                yield {**node.streaming(server.url, asked), "XDG_RUNTIME_DIR": str(node.runtime())}
        finally:
            node.stop_prefetcher(node.runtime())


STATES: dict[str, State] = {"cold": cold, "warm": warm, "resident": resident}


def main() -> None:
    """Measure, print the table for people and the result as one line, keep it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=list(LOADERS), choices=list(LOADERS))
    parser.add_argument("--states", nargs="*", default=list(STATES), choices=list(STATES))
    wanted = parser.parse_args()
    directory = checkpoint.built()
    engine.import_all()
    samples: list[dict[str, Any]] = []
    steps = [
        (name, state)
        for name in wanted.only
        for state in wanted.states
        if state != "resident" or name == report.OURS
    ]
    for number in range(wanted.runs):
        samples += _round(directory, steps, number)
    report.finish("weights-peers", report.peers(samples, checkpoint.size(directory)))


def _round(directory: Path, steps: list[tuple[str, str]], number: int) -> list[dict[str, Any]]:
    found = []
    held = TouchedMemory(HELD)
    shift = number * len(steps) // 5 % len(steps)
    for name, state in steps[shift:] + steps[:shift]:
        with STATES[state](directory) as environment:
            held.take()
            work = partial(_load, directory, name, environment, number == 0)
            taken = engine.run_in_child(work, held.release)
        found.append({"loader": name, "state": state, "round": number, **taken})
        print(_line(found[-1]), file=sys.stderr, flush=True)
    return found


def _load(
    directory: Path, name: str, environment: Mapping[str, str], look: bool, ready: engine.Ready
) -> dict[str, Any]:
    os.environ.update(environment)
    # A start from the prefetcher has no files, so that a fallback to files cannot go unnoticed.
    model = node.bare(directory) if environment else directory
    return engine.load(model, LOADERS[name], look, ready)


def _line(sample: dict[str, Any]) -> str:
    seconds = f"{sample['load_s']:.2f} s" if "load_s" in sample else sample["error"]
    return f"round {sample['round']}: {sample['loader']}, {sample['state']}: {seconds}"


if __name__ == "__main__":
    main()
