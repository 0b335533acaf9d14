"""Figures 13 and 14 of ParaServe, measured: real vLLM on the CPU, on two network namespaces with slow links.

docs/explanation/paraserve.md describes the proportions, which are those of Llama2-13B on V100, and the fleet's inputs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise, product
from pathlib import Path
from shutil import copytree, ignore_patterns
from statistics import fmean, median
from typing import Any

import psutil

from benchmarks import llama
from benchmarks.fleet.linked import Heard, LinkedFleet, linked_fleet, materialize
from benchmarks.papers import Found, Rows, declare
from coldstart.contract.arguments import Arguments
from coldstart.fleet.live.deployments import build_deployment
from coldstart.fleet.live.orders import build_rank_arguments
from coldstart.fleet.specification import DeployOptions, FleetSettings, ServerSpec
from coldstart.host.launches import Launch
from coldstart.system.paths import Cache
from tests.support import range_server  # type: ignore[import-not-found]
from tests.tools.memory import measure_memory_files, measure_private_bytes, watch_memory  # type: ignore[import-not-found]

SHAPE, RANKS, NAME, TTFT_S, FETCH_S = "8-layers", 2, "m", 12.0, 15.6
NODES, SLO = ("one", "two"), f"ttft={TTFT_S}"
KV, DEVICE = 5.0 / 26.03, 32.0 / 26.03
TOKENS, BURST, BURST_TOKENS, BATCH = 512, 16, 64, 8
JOINS = dict[int, float]()
"""Seconds from loaded weights to ready by number of ranks, as the fleets before measured them: one that runs on knows them."""


@cache
def prepare() -> tuple[Path, int, list[str]]:
    """Build the checkpoint and the bundles of one worker and of two ranks; return its directory, bytes and arguments."""
    place = Cache.at().root / "paraserve-benchmark" / SHAPE
    place.parent.mkdir(parents=True, exist_ok=True)
    size = llama.build(SHAPE, place)
    words = ["--max-model-len", "1024", "--max-num-seqs", "16"]
    words += ["--kv-cache-memory-bytes", str(int(KV * size) >> 20 << 20)]
    for ranks in (1, RANKS):
        materialize(str(place), *(build_rank_arguments(Arguments(words), ranks) if ranks > 1 else words))
    bare = place.with_name(f"{SHAPE}-bare")
    if not bare.is_dir():
        copytree(place, bare, ignore=ignore_patterns("*.safetensors*"))
    return bare, size, words


@asynccontextmanager
async def cold(
    ranks: int, workers: int = 1, *, consolidate: bool = True, fetch_s: float = FETCH_S, slo: str = SLO
) -> AsyncIterator[LinkedFleet]:
    """Yield a fleet whose two servers have nothing of the deployed model, which a link fetches in `fetch_s` seconds.

    Without an SLO, no other number of ranks than `ranks` can be chosen.
    """
    bare, size, words = prepare()
    settings, memory = FleetSettings(most_ranks=ranks, consolidate=consolidate), str(int(size * (1 + KV)))
    async with linked_fleet(settings) as fleet:
        range_server.HOST = fleet.links.bridge
        with range_server.run_server(bare.with_name(SHAPE)) as source:
            for name in NODES:
                fleet.join(ServerSpec(name, int(DEVICE * size), size / fetch_s, 1e10), size / fetch_s)
            launch = Launch(NAME, str(bare), Arguments(words), weights_from=source.url)
            await fleet.warm(launch)
            options = DeployOptions(most=workers, slo=slo, batch=BATCH, memory=memory)
            made = build_deployment(launch, options, Cache.at(), offline=True)
            others = {} if slo else {count: "not compared" for count in (1, RANKS) if count != ranks}
            spec = replace(made.spec, unavailable=made.spec.unavailable | others, joins=dict(JOINS))
            fleet.control.deploy(replace(made, spec=spec))
            yield fleet
            JOINS.update(fleet.control.state.models[NAME].spec.joins)


async def ask(fleet: LinkedFleet, tokens: int, number: int = 0) -> Heard:
    body = {"model": NAME, "prompt": [100 + number, *range(200, 260)], "max_tokens": tokens}
    body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    heard = await fleet.stream(body, Heard())
    assert heard.whole and not heard.error, heard.error
    return heard


def find_pids(namespace: int, word: bytes = b"") -> Iterator[int]:
    """Yield the processes in a network namespace, by the number of its file, whose command contains `word`."""
    for pid in psutil.pids():
        with suppress(OSError):  # it has ended
            place = Path(f"/proc/{pid}")
            if (place / "ns/net").stat().st_ino == namespace and word in (place / "cmdline").read_bytes():
                yield pid


async def generate(ranks: int, *, consolidate: bool = True, slo: str = SLO) -> dict[str, Any]:
    """Request one long answer from a stopped model; return what was decided, the time of each token, and memory in bytes.

    The memory is that of the server that remains: `base` before the request, `first` at the first token, and `peak`. `kept` are
    weights in memory files at the end, `prefetcher` is its own memory, and `own` is what `first` has besides all these and the
    rank's weights, so without the KV cache, which is mapped as tokens are written.
    """
    async with cold(ranks, consolidate=consolidate, slo=slo) as fleet:
        namespace = Path("/run/netns", fleet.links.within(NODES[0])[3]).stat().st_ino
        base = measure_private_bytes(find_pids(namespace))
        with watch_memory(partial(find_pids, namespace)) as samples:
            heard = await ask(fleet, TOKENS)
        kept = sum(measure_memory_files(find_pids(namespace)).values())
        fetching = measure_private_bytes(find_pids(namespace, b"prefetch.service")) - kept
        spec, moved = fleet.control.state.models[NAME].spec, fleet.lines("moved")
        launched, *_, last = *fleet.lines("launch"), fleet.lines("launch")[-1]
    # Of equal servers the first by name gets the largest rank, which remains.
    assert last["servers"][-1] == NODES[0], last
    first = next(held for at, held in samples if at >= heard.times[0])
    share = spec.ranks(len(launched["servers"]))[-1]
    own, peak, size = first - base - share - kept - fetching, max(held for _, held in samples), spec.size
    memory = {"base": base, "first": first, "kept": kept, "prefetcher": fetching, "own": own, "peak": peak}
    memory |= {"last": samples[-1][1], "weights": size, "samples": len(samples)}
    times = [round(at - heard.began, 3) for at in heard.times]
    return {**launched, "moved": moved, "ids": heard.ids, "memory": memory, "times": times}


def figure13() -> Found:
    """Time of each token of one cold request, with the pipeline replaced by one worker and without; both measured."""
    # These starts teach the fleet how long each takes, and show what a rank and a worker need besides weights.
    alone, kept = (asyncio.run(generate(ranks, consolidate=False, slo="")) for ranks in (1, RANKS))
    replaced = asyncio.run(generate(RANKS))
    memory, times = replaced["memory"], replaced["times"]
    growth, own = memory["peak"] - memory["base"], alone["memory"]["own"] + kept["memory"]["own"]
    own += memory["prefetcher"]
    gap = max((line["gap_s"] for line in replaced["moved"]), default=0.0)
    return [
        ("ranks, limit of 12 s on the first token", "2 ranks: 10.2 s predicted; one worker: 17.2 s",
         f"{len(replaced['servers'])} ranks: {times[0]:.1f} s ({replaced['choice']})"),
        ("end of 512 tokens, pipeline kept over replaced", "2.29x", f"{kept['times'][-1] / times[-1]:.2f}x"),
        ("tokens after the first, the same", "-",
         f"{(kept['times'][-1] - kept['times'][0]) / (times[-1] - times[0]):.2f}x"),
        ("growth of the remaining server's memory at the peak, engines' own memory taken off",
         "1.00 to 1.15 of the weights asked", f"{(growth - own) / memory['weights']:.2f} of the weights"),
        ("the same, with the engines' own memory", "-", f"{growth / memory['weights']:.2f} of the weights"),
        ("the stream's gap when it moved; same tokens as in the pipeline", "-",
         f"{gap:.2f} s; {replaced['ids'] == kept['ids']}"),
    ], {"replaced": replaced, "kept": kept, "alone": alone}  # fmt: skip


async def burst(ranks: int) -> dict[str, Any]:
    """Send requests at once to a stopped model; return mean times to first token and per token, and what the fleet did."""
    async with cold(ranks, workers=2) as fleet:
        all_heard = await asyncio.gather(*(ask(fleet, BURST_TOKENS, number) for number in range(BURST)))
        launched, moved = fleet.lines("launch"), fleet.lines("moved")
    moves = {"moves": len(moved), "with_kv": sum(bool(one["with_kv"]) for one in moved)}
    ttft_s = fmean(one.times[0] - one.began for one in all_heard)
    tpot_s = fmean(b - a for one in all_heard for a, b in pairwise(one.times))
    workers = [len(one["servers"]) for one in launched]
    return {"ttft_s": ttft_s, "tpot_s": tpot_s, "workers": workers, **moves, "log": [*launched, *moved]}


def figure14() -> Found:
    """Mean TTFT and TPOT of 16 requests at once for a stopped model, by most ranks of a group; measured."""
    asyncio.run(start(RANKS, FETCH_S))  # teaches the fleet how long a pipeline takes
    one, two = (asyncio.run(burst(ranks)) for ranks in (1, RANKS))
    return [
        ("TTFT, single workers over groups of ranks", "1.87x (four ranks, 128 requests)",
         f"{one['ttft_s'] / two['ttft_s']:.2f}x ({one['ttft_s']:.1f} s, {two['ttft_s']:.1f} s)"),
        ("TPOT, groups of ranks over single workers", "1.08x to 1.19x",
         f"{two['tpot_s'] / one['tpot_s']:.2f}x ({1e3 * two['tpot_s']:.0f} ms, {1e3 * one['tpot_s']:.0f} ms)"),
        ("ranks of each start, without pipelines and with them", "-", f"{one['workers']}, {two['workers']}"),
        ("streams that moved, with their KV", "-", f"{two['moves']}, {two['with_kv']}"),
    ], {"workers": one, "groups": two}  # fmt: skip


async def start(ranks: int, fetch_s: float) -> dict[str, float]:
    """Start a stopped model on `ranks` servers; return the seconds to the first token, and those that the fleet predicted."""
    learned = ranks in JOINS
    async with cold(ranks, consolidate=False, fetch_s=fetch_s, slo="") as fleet:
        heard = await ask(fleet, 2)
        (group,) = fleet.control.core.groups.values()
    measured_s, predicted_s = heard.times[0] - heard.began, group.predicted_s or 0.0
    return {"measured_s": measured_s, "predicted_s": predicted_s, "learned": learned}


def links() -> Found:
    """Cold TTFT of one worker and of two ranks at three link rates, measured in turns, against the fleet's predictions."""
    cells = {cell: list[dict[str, float]]() for cell in product((8.0, FETCH_S, 31.0), (1, RANKS))}
    for _, ((fetch_s, ranks), starts) in product(range(3), cells.items()):
        starts.append(asyncio.run(start(ranks, fetch_s)))
    rows, middles = Rows(), list[float]()
    for (fetch_s, ranks), starts in cells.items():
        least, middle, most = sorted(one["measured_s"] for one in starts)
        middles.append(middle)
        ratio = f", {middle / middles[-2]:.2f}x of one worker" if ranks > 1 else ""
        what = f"weights fetched in {fetch_s:g} s, {ranks} ranks"
        rows.append((what, "-", f"{middle:.1f} s ({least:.1f} to {most:.1f}){ratio}"))
    errors = [abs(one["predicted_s"] / one["measured_s"] - 1) for starts in cells.values() for one in starts]
    shown = f"{median(errors):.0%} ({min(errors):.0%} to {max(errors):.0%})"
    rows.append(("error of the time that the fleet predicted, median and range", "-", shown))
    return rows, {what: starts for (what, *_), starts in zip(rows, cells.values(), strict=False)}


def tpot() -> Found:
    """Ranks that the fleet chose under three limits on TPOT, and those of equations 1, 2 and 5 with the same inputs."""
    asyncio.run(start(RANKS, FETCH_S))  # teaches the fleet how long a pipeline takes
    rows, details = Rows(), dict[str, Any]()
    for limit_ms in (10, 40, 200):
        found = details[f"{limit_ms} ms"] = asyncio.run(choose(limit_ms / 1e3))
        what = f"limit of {limit_ms} ms: ranks, and how many of them full"
        ours = f"{found['chosen']}; {1e3 * found['measured_s']:.0f} ms for one stream"
        rows.append((what, f"{found['expected']} (Algorithm 1)", ours))
    return rows, details


async def choose(tpot_s: float) -> dict[str, Any]:
    """Start a stopped model with limits on both times; return the fleet's scheme, that of the paper, and their inputs.

    The pipeline stays one, so that its time per token can be measured.
    """
    async with cold(RANKS, consolidate=False, slo=f"{SLO},tpot={tpot_s}") as fleet:
        heard = await ask(fleet, BURST_TOKENS)
        (group,), model = fleet.control.core.groups.values(), fleet.control.state.models[NAME].spec
        (hop_s,) = fleet.control.core.roster.hops.values()
    launched, expected = group.workers[0].launch, (1, 1)
    for ranks, full in ((2, 2), (2, 1), (2, 0), (1, 1)):
        costs, slowdown = model.group_costs(ranks), ranks - full + full / ranks
        hops_s = hop_s * ranks if ranks > 1 else 0.0
        loaded_s = max(costs.library_s, max(model.ranks(ranks)) * FETCH_S / model.size)
        ttft_s = loaded_s + costs.join_s * ranks + costs.prefill_s * slowdown + hops_s
        if ttft_s <= TTFT_S and costs.decode_s * slowdown + hops_s <= tpot_s:
            expected = ranks, full
    found = {"choice": group.choice, "hop_s": hop_s, "decode_s": model.costs.decode_s, "expected": expected}
    found |= {"measured_s": fmean(b - a for a, b in pairwise(heard.times))}
    return found | {"chosen": (launched.ranks, launched.full)}


MEASURED = declare(figure13, figure14, links, tpot, kind="measured")
