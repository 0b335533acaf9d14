"""Table of the live host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.tables import Part, Table, listed, met

# Targets: throughput through the gateway over direct; seconds of starts over those of GDSF and LRU.
THROUGHPUT, OVER_GDSF, OVER_LRU = 0.97, 0.9, 0.6
Row = Mapping[str, Any]


def loads(result: Row) -> str:
    """Return the load average before each part, the largest first."""
    found = sorted(((part["about"]["load_before"], name) for name, part in result.items()), reverse=True)
    return listed(f"{load:.1f} in `{name}`" for load, name in found)


def cold(found: Row) -> Iterator[tuple[str, str]]:
    yield (
        "`cold`: {requests} requests to a stopped model".format_map(found),
        "{starts} start ({start[seconds]:.1f} s until ready, `{start[mode]}`), {answered} answered, {seen_by_server} received"
        " by vLLM, {out_of_order_at_server} out of order".format_map(found),
    )


def overhead(found: Row) -> Iterator[tuple[str, str]]:
    runs, later = found["throughput"], found["ttft_s"]["over_direct"]
    yield (
        f"`overhead`: first token of a running model through the gateway and directly ({later['n']} pairs)",
        f"{later['p50'] * 1e3:.1f} ms later at the median (quartiles {later['p25'] * 1e3:.1f} and {later['p75'] * 1e3:.1f} ms)",
    )
    ratios = listed(
        f"{clients} clients {{p50:.2f}}x (quartiles {{p25:.2f}} and {{p75:.2f}})".format_map(one["ratio"])
        for clients, one in runs.items()
    )
    cost = " and ".join(f"{one['gateway_cpu_s_per_token'] * 1e6:.0f}" for one in runs.values())
    yield (
        f"`overhead`: output tokens per second over direct, both on {found['about']['cores']} shared cores",
        f"{ratios}; target {THROUGHPUT}: {met(all(one['ratio']['p50'] >= THROUGHPUT for one in runs.values()))}; the gateway "
        f"uses {cost} µs of CPU for each token",
    )


def tournament(found: Row) -> Iterator[tuple[str, str]]:
    live, quotients = found["totals"]["live"], [run["simulated_over_live"] for run in found["runs"]]
    holds = live["over_gdsf"] <= OVER_GDSF and live["over_lru"] <= OVER_LRU
    yield (
        f"`tournament`: seconds of starts, {len(found['models'])} models in {found['memory_share']:.0%} of their memory",
        f"predictive {live['predictive']:.1f}, GDSF {live['gdsf']:.1f}, LRU {live['lru']:.1f}: {live['over_gdsf']:.2f}x of GDSF"
        f" and {live['over_lru']:.2f}x of LRU; target {OVER_GDSF} and {OVER_LRU}: {met(holds)}; simulated over live "
        f"{min(quotients):.2f} to {max(quotients):.2f} in {len(quotients)} runs",
    )


def host(result: Row) -> Iterator[Row]:
    """Yield the lines of all live parts."""
    for part in (cold, overhead, tournament):
        for name, found in part(result[part.__name__]):
            yield {"part": name, "result": found}


PARTS = [
    Part("docs/reference/host-measurements.md", "host-load", "host-live-cpu", (loads,), "host/live"),
    Part(
        "docs/reference/host-measurements.md",
        "host",
        "host-live-cpu",
        (Table(host, {"part": "{part}", "result": "{result}"}),),
        "host/live",
    ),
]
