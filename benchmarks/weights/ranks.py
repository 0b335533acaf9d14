"""Bytes that each rank of a pipeline reads, against the bytes of its layers.

Two real ranks of one process group load with vLLM's default loader and with ours from local files, and with ours over HTTP
through one prefetcher per rank. Each rank has a cold copy of the files. Bytes are counted by /proc/self/io and by the
servers. No time is measured.

Run: python -m benchmarks weights/ranks
Time: about 3 minutes
Result: weights-ranks.json
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.weights import checkpoint, engine, file_server, node, report

RANKS = 2
CONFIG = checkpoint.CONFIG | {"num_hidden_layers": 8}
WAYS = {"vllm": "safetensors", "coldstart, files": "coldstart", "coldstart, HTTP": "coldstart"}


def main() -> None:
    """Count, print the table for people and the result as one line, keep it."""
    source = checkpoint.built(CONFIG)
    engine.import_all()
    samples = [
        sample for way in WAYS for sample in (_over_http if "HTTP" in way else _from_files)(way, source)
    ]
    report.finish("weights-ranks", report.ranks(samples, checkpoint.size(source)))


def _from_files(way: str, source: Path) -> list[dict[str, Any]]:
    """Each rank has the checkpoint for itself."""
    with _scratch() as scratch:
        copies = [Path(shutil.copytree(source, scratch / str(number))) for number in range(RANKS)]
        for copy in copies:
            checkpoint.evict(copy)
        found = _ranks(way, copies, lambda _: None)
    return [sample | {"bytes": sample["read_bytes"]} for sample in found]


def _over_http(way: str, source: Path) -> list[dict[str, Any]]:
    """Each rank has a server and a prefetcher for itself."""
    bare, plan = node.bare(source), node.plan(source)
    with _scratch() as scratch, ExitStack() as running:
        servers = [running.enter_context(file_server.running(source)) for _ in range(RANKS)]
        places = [scratch / str(number) for number in range(RANKS)]

        def environment(number: int) -> None:
            os.environ.update(node.streaming(servers[number].url, plan))
            os.environ["XDG_RUNTIME_DIR"] = str(places[number])

        for place in places:
            place.mkdir(mode=0o700)
            running.callback(node.stop_prefetcher, place)
        found = _ranks(way, [bare] * RANKS, environment)
        sent = [server.sent_bytes() for server in servers]
    return [sample | {"bytes": count} for sample, count in zip(found, sent, strict=True)]


def _ranks(way: str, models: list[Path], environment: Callable[[int], None]) -> list[dict[str, Any]]:
    """All ranks at once, each in a fork; raises RuntimeError when one fails."""
    rendezvous = Path(tempfile.mkdtemp(dir=checkpoint.home())) / "rendezvous"

    def work(number: int, ready: Callable[[], None]) -> dict[str, Any]:
        environment(number)
        rank = engine.Rank(number, RANKS, rendezvous)
        return engine.load(models[number], {"load_format": WAYS[way]}, ready=ready, rank=rank)

    with ThreadPoolExecutor(RANKS) as pool:
        found = list(pool.map(lambda number: engine.run_in_child(partial(work, number)), range(RANKS)))
    shutil.rmtree(rendezvous.parent)
    for left in Path("/dev/shm").glob(f"{rendezvous.parent.name}-*"):  # the forks end without cleaning up
        left.unlink()
    if errors := [sample["error"] for sample in found if "error" in sample]:
        raise RuntimeError(f"{way}: {errors[0]}")
    return [{"way": way, "rank": number, **sample} for number, sample in enumerate(found)]


@contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=checkpoint.home()) as made:
        yield Path(made)


if __name__ == "__main__":
    main()
