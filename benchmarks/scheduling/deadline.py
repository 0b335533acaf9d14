"""Deadlines against first come, first served, and against the best order by prompt length. Simulated.

The factor was chosen on other requests: the first ones of the Azure conversation and Mooncake traces, log-normal lengths and
other draws from ShareGPT. Of 16, 20, 24, 28, 32 and 64 it is the smallest whose mean gain there was 1.3x; but results of
several factors on the cells below were known by then, so they are not strictly held out. The cells run on the queue model of
`--shadow`, whose times to first token are within 15 % of those of vLLM's own scheduler
(`tests/property/test_engine_simulator.py`). The engine is the roofline of OPT-13B (`papers/engine.py`), and arrivals are
Poisson. `jittered` is FCFS with arrivals that are up to half a second later: the noise of a comparison.

Bounds with the larger factor: with `bounded` no request passes another that arrived BOUND_S earlier; with `counted` at most as
many later requests pass one as waited when it arrived; with `aged` a request is passed within as many seconds as the oldest
waiting one had waited when it arrived.

A ratio is FCFS over the other order, so above 1 is a gain; `longest` is the mean latency of the tenth of requests with the
longest outputs, and `most` the longest time to first token. Requests wait in a cell if FCFS doubles the time of their prefills.

Run: python -m benchmarks scheduling/deadline
Time: about five minutes
Result: deadline-simulated.json
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from math import inf
from random import Random
from statistics import fmean, geometric_mean
from typing import Any

from benchmarks.common import finish
from benchmarks.papers.engine import BANDWIDTH, OPT_13B, capacity
from benchmarks.papers.lengths import LONGEST, alpaca, sharegpt
from benchmarks.traces import azure_conversation, mooncake_conversation
from coldstart.lab.plan import replace_arrivals
from coldstart.lab.traces import TraceRequest
from coldstart.scheduling.settings import SchedulerSettings
from coldstart.scheduling.shadow import FinishedRequest, QueueModel, QueueReplay, SortKey

BATCH, BUDGET, BOUND_S = 32, 2048, 10.0
FACTOR, LARGE = SchedulerSettings().factor, 64.0
LOADS: tuple[float | str, ...] = (0.5, 0.7, 0.9, 1.1, "burst")
SEEDS, KV_TOKENS = range(3, 18), (24_000, 48_000, 164_000)
PROFILE, CONTEXT_S = OPT_13B.profile(), OPT_13B.kv_bytes_per_token / BANDWIDTH
FIGURES = ("ttft", "p95_ttft", "longest", "most")
Figures = dict[str, float]


def list_sources() -> dict[str, list[TraceRequest]]:
    """Return 200 requests of each kind, without arrivals that matter or shared prefixes."""
    azure = [row for row in azure_conversation() if row.prompt_tokens + row.output_tokens <= LONGEST]
    mooncake = [replace(row, hash_ids=()) for row in mooncake_conversation() if row.prompt_tokens < 20_000]
    chats = [TraceRequest(0.0, *size) for size in sharegpt(150, 8)]
    return {
        "azure": azure[5000:5200],
        "mooncake": mooncake[4000:4200],
        "sharegpt": [TraceRequest(0.0, *size) for size in sharegpt(200, 7)],
        "alpaca": [TraceRequest(0.0, *size) for size in alpaca(200, 7)],
        "mix": Random(3).sample(chats + mooncake[6000:6050], 200),
    }


def list_orders(seed: int) -> dict[str, SortKey]:
    """Return the keys by which requests are served."""
    jitter = Random(seed)

    def by_deadline(factor: float, bound_s: float = inf) -> SortKey:
        return lambda one: one.arrival_s + min(bound_s, factor * PROFILE.prefill(one.prompt))

    return {
        "fcfs": lambda one: one.arrival_s,
        "deadline": by_deadline(FACTOR),
        "smaller_factor": by_deadline(16.0),
        "larger_factor": by_deadline(LARGE),
        "bounded": by_deadline(LARGE, BOUND_S),
        "shortest_prompt": lambda one: one.prompt,
        "jittered": lambda one: one.arrival_s + jitter.uniform(0, 0.5),
    }


class Counted(QueueReplay):
    """Run in which at most as many later requests pass a request as waited when it arrived."""

    def _arrive(self, number: int) -> None:
        self.left_to_pass: dict[int, int] = getattr(self, "left_to_pass", {})
        waiting = [other for _, other in self.waiting if self.first_token_at_s[other] == inf]
        spent = (self.ranks[other][0] for other in waiting if not self.left_to_pass[other])
        key = max([self.ranks[number][0], *spent])
        for other in waiting:
            self.left_to_pass[other] -= self.ranks[other][0] > key
        self.left_to_pass[number] = len(waiting)
        self.ranks[number] = (key, number)
        super()._arrive(number)


class Aged(QueueReplay):
    """Run in which a request is passed within as many seconds as the oldest waiting one had waited when it arrived."""

    def _arrive(self, number: int) -> None:
        arrival_s = self.requests[number].arrival_s
        waiting = (
            self.requests[other].arrival_s for _, other in self.waiting if self.first_token_at_s[other] == inf
        )
        age_s = arrival_s - min(waiting, default=arrival_s)
        self.ranks[number] = (min(self.ranks[number][0], arrival_s + age_s), number)
        super()._arrive(number)


def figures_of(ttft_s: Sequence[float], latency_s: Sequence[float], rows: Sequence[TraceRequest]) -> Figures:
    """Return the mean, the 95th percentile and the largest TTFT, and the mean latency of the longest tenth, in seconds."""
    ordered = sorted(ttft_s)
    longest = sorted(range(len(rows)), key=lambda number: rows[number].output_tokens)[-len(rows) // 10 :]
    tail = fmean(latency_s[number] for number in longest)
    return dict(
        zip(FIGURES, (fmean(ordered), ordered[int(0.95 * len(ordered))], tail, ordered[-1]), strict=True)
    )


def predict(
    rows: Sequence[TraceRequest], kv_tokens: int, key: SortKey, kind: type[QueueReplay] = QueueReplay
) -> Figures:
    """Replay on the queue model."""
    model = QueueModel(PROFILE, BATCH, BUDGET, kv_tokens, CONTEXT_S)
    requests = [FinishedRequest(row.arrival_s, row.prompt_tokens, 0, row.output_tokens) for row in rows]
    return figures_of(*model.replay(requests, key, kind), rows)


def compare(base: Figures, other: Figures) -> Figures:
    return {name: base[name] / other[name] for name in FIGURES}


def run_cell(rows: Sequence[TraceRequest], load: float | str, kv_tokens: int, seed: int) -> dict[str, Any]:
    """Return the figures of one cell."""
    full = capacity(OPT_13B, [(row.prompt_tokens, row.output_tokens) for row in rows], BATCH)
    arrivals = list(replace_arrivals(rows, full * load if isinstance(load, float) else 1e6, 1, seed))
    orders = list_orders(seed)
    found = {name: predict(arrivals, kv_tokens, key) for name, key in orders.items()}
    for name, kind in ("counted", Counted), ("aged", Aged):
        found[name] = predict(arrivals, kv_tokens, orders["larger_factor"], kind)
    return {
        "load": load, "kv_tokens": kv_tokens, "seed": seed, "fcfs": found["fcfs"],
        "waits": found["fcfs"]["ttft"] > 2 * fmean(PROFILE.prefill(row.prompt_tokens) for row in rows),
        "ratios": {name: compare(found["fcfs"], found[name]) for name in found if name != "fcfs"},
    }  # fmt: skip


def summarize(cells: Sequence[dict[str, Any]], of: Callable[[dict[str, Any]], Figures]) -> dict[str, Any]:
    """Return the geometric means where requests wait, and the cells below 0.97 and the lowest among all cells."""
    return {
        figure: {
            "mean_where_requests_wait": geometric_mean(of(cell)[figure] for cell in cells if cell["waits"]),
            "cells_below_0.97": sum(of(cell)[figure] < 0.97 for cell in cells),
            "lowest": min(of(cell)[figure] for cell in cells),
        }
        for figure in FIGURES
    }


def describe(cell: dict[str, Any]) -> str:
    """Return one line: the cell, and the ratios of deadlines in the order of FIGURES."""
    ratios = " ".join(f"{cell['ratios']['deadline'][figure]:.3f}" for figure in FIGURES)
    return f"{cell['lengths']}, load {cell['load']}, {cell['kv_tokens']} KV tokens, seed {cell['seed']}: {ratios}"


def main() -> None:
    cells = [
        {"lengths": name, **run_cell(rows, load, kv, seed)}
        for name, rows in list_sources().items()
        for kv, load, seed in product(KV_TOKENS, LOADS, SEEDS)
        # One Mooncake request can be as large as the smallest memory.
        if kv > KV_TOKENS[0] or name not in ("mooncake", "mix")
    ]  # fmt: skip
    kinds = {name: [cell for cell in cells if cell["lengths"] == name] for name in list_sources()}
    result = {
        "kind": "simulated",
        "batch": BATCH,
        "factor": FACTOR,
        "larger_factor": LARGE,
        "bound_s": BOUND_S,
        "seeds": len(SEEDS),
        "cells_in_all": len(cells),
        "cells_where_requests_wait": sum(cell["waits"] for cell in cells),
        "summary": {
            name: summarize(cells, lambda cell, n=name: cell["ratios"][n])  # type: ignore[misc]
            for name in cells[0]["ratios"]
        },
        "ttft_by_lengths": {
            name: geometric_mean(
                [cell["ratios"]["deadline"]["ttft"] for cell in of if cell["waits"]] or [1.0]
            )
            for name, of in kinds.items()
        },
        "cells": [describe(cell) for cell in cells],
    }
    finish("deadline-simulated", result)


if __name__ == "__main__":
    main()
