"""Figures 13 and 14 of ParaServe, measured: real vLLM on the CPU, on two network namespaces with slow links.

The proportions are those of Llama2-13B on V100: a link fetches the weights in 15.6 s, the KV has 5 bytes for 26 of weights, a
device has 32, and the limit on the time to first token is 12 s, which only two ranks can meet. Predicted times of a start
are those of the fit to the cold starts of the paper.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from shutil import copytree, ignore_patterns
from statistics import fmean
from typing import Any

from benchmarks import llama
from benchmarks.common import load
from benchmarks.fleet.linked import Heard, LinkedFleet, linked_fleet, materialize
from coldstart.contract.arguments import Arguments
from coldstart.fleet.live.deployments import build_deployment
from coldstart.fleet.live.orders import build_rank_arguments
from coldstart.fleet.sizing import Offer, list_schemes
from coldstart.fleet.specification import DeployOptions, FleetSettings, ServerSpec
from coldstart.host.launches import Launch
from coldstart.system.paths import Cache
from tests.support import range_server  # type: ignore[import-not-found]
from tests.tools.memory import measure_private_bytes  # type: ignore[import-not-found]

SHAPE, RANKS, NAME, TTFT_S, FETCH_S = "8-layers", 2, "m", 12.0, 15.6
FIT = load("fleet-cold-ttft")["fit"]
KV, DEVICE = 5.0 / 26.03, 32.0 / 26.03
TOKENS, BURST, BURST_TOKENS, BATCH = 512, 16, 64, 8


def prepare() -> tuple[Path, int, list[str]]:
    """Build the checkpoint and the bundles of one worker and of two ranks; return its directory, bytes and arguments."""
    place = Cache.at().root / "paraserve-benchmark" / SHAPE
    place.parent.mkdir(parents=True, exist_ok=True)
    size = llama.build(SHAPE, place)
    words = [
        "--max-model-len",
        "1024",
        "--max-num-seqs",
        "16",
        "--kv-cache-memory-bytes",
        str(int(KV * size) >> 20 << 20),
    ]
    for ranks in (1, RANKS):
        materialize(str(place), *(build_rank_arguments(Arguments(words), ranks) if ranks > 1 else words))
    bare = place.with_name(f"{SHAPE}-bare")
    if not bare.is_dir():
        copytree(place, bare, ignore=ignore_patterns("*.safetensors*"))
    return bare, size, words


@asynccontextmanager
async def cold(
    ranks: int, workers: int = 1, *, consolidate: bool = True, fetch_s: float = FETCH_S, only: bool = False
) -> AsyncIterator[LinkedFleet]:
    """Yield a fleet whose two servers have nothing of the deployed model, which a link fetches in `fetch_s` seconds.

    With `only`, no other number of ranks than `ranks` can be chosen.
    """
    bare, size, words = prepare()
    settings, memory = FleetSettings(most_ranks=ranks, consolidate=consolidate), str(int(size * (1 + KV)))
    async with linked_fleet(settings) as fleet:
        range_server.HOST = fleet.links.bridge
        with range_server.run_server(bare.with_name(SHAPE)) as source:
            for name in ("one", "two"):
                fleet.join(ServerSpec(name, int(DEVICE * size), size / fetch_s, 1e10), size / fetch_s)
            launch = Launch(NAME, str(bare), Arguments(words), weights_from=source.url)
            await fleet.warm(launch)
            slo = None if only else f"ttft={TTFT_S}"
            options = DeployOptions(most=workers, slo=slo, batch=BATCH, memory=memory)
            made = build_deployment(launch, options, Cache.at(), offline=True)
            # The bundles' own times depend on what else ran when they were built.
            costs = replace(made.spec.costs, library_s=FIT["runtime_s"])
            seconds = {count: FIT["first_s"] + count * FIT["rank_s"] for count in (1, RANKS)}
            unavailable = {count: "not compared" for count in (1, RANKS) if only and count != ranks}
            spec = replace(made.spec, costs=costs, recorded=seconds, unavailable=unavailable)
            fleet.control.deploy(replace(made, spec=spec))
            yield fleet


async def ask(fleet: LinkedFleet, tokens: int, number: int = 0) -> Heard:
    body = {"model": NAME, "prompt": [100 + number, *range(200, 260)], "max_tokens": tokens}
    heard = await fleet.stream(
        body | {"temperature": 0, "ignore_eos": True, "return_token_ids": True}, Heard()
    )
    assert heard.whole and not heard.error, heard.error
    return heard


def measure_node_bytes(fleet: LinkedFleet, node: str) -> int:
    """Return the memory of all processes in the namespace of a node, without pages that files back."""
    command = ["ip", "netns", "pids", fleet.links.within(node)[3]]
    pids = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return int(measure_private_bytes(map(int, pids)))


@contextmanager
def watching(fleet: LinkedFleet, found: dict[str, list[int]]) -> Iterator[None]:
    """Record the memory of each node twice a second during the block."""

    async def watch() -> None:
        while True:
            for node in fleet.nodes:
                found.setdefault(node, []).append(await asyncio.to_thread(measure_node_bytes, fleet, node))
            await asyncio.sleep(0.5)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()


async def generate(*, consolidate: bool) -> dict[str, Any]:
    """Request one long answer from a stopped model; return what was decided, and the time of each token."""
    memory = dict[str, list[int]]()
    async with cold(RANKS, consolidate=consolidate) as fleet:
        with watching(fleet, memory):
            heard = await ask(fleet, TOKENS)
        launched, moved = fleet.lines("launch")[0], fleet.lines("moved")
        spec = fleet.control.state.models[NAME].spec
        first, *_, last = node = max(memory.values(), key=max)
        # What the engine that remains needs besides the weights; at the peak there were two.
        own = last - first - spec.size
        factor = (max(node) - first - 2 * own) / spec.memory
        times = [round(at - heard.began, 3) for at in heard.times]
        found = {
            "choice": launched.get("choice"),
            "ranks": len(launched["servers"]),
            "moved": moved,
            "ids": heard.ids,
        }
        return found | {"peak_factor": factor, "weights": spec.size, "memory": memory, "times": times}


async def burst(ranks: int) -> tuple[float, float]:
    """Send requests at once to a stopped model; return the means of the times to first token and per token."""
    async with cold(ranks, workers=2) as fleet:
        all_heard = await asyncio.gather(*(ask(fleet, BURST_TOKENS, number) for number in range(BURST)))
    ttft = fmean(one.times[0] - one.began for one in all_heard)
    return ttft, fmean(b - a for one in all_heard for a, b in pairwise(one.times))


async def start(ranks: int, fetch_s: float) -> tuple[float, float]:
    """Start a stopped model on `ranks` servers; return the seconds to the first token, and those that were predicted."""
    async with cold(ranks, consolidate=False, fetch_s=fetch_s, only=True) as fleet:
        spec = fleet.control.state.models[NAME].spec
        offers = [Offer(name, spec.size / fetch_s, 1e10, int(DEVICE * spec.size)) for name in fleet.nodes]
        predicted = next(list_schemes(spec, offers, FleetSettings(most_ranks=ranks))).ttft_s
        heard = await ask(fleet, 2)
    return heard.times[0] - heard.began, predicted
