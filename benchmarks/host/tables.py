"""Tables of the eviction policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.tables import Part, Table, listed, met

PAGE, LIVE = "benchmarks/MODEL_CACHE.md", "docs/reference/host-measurements.md"
CACHE = "model-cache-simulated"
# Target of the throughput through the gateway over direct.
THROUGHPUT = 0.97
GROUPS = ("tuned", "held out", "all", "all, percentile 90", "all, worst")
SHOWN = ("lru", "lfu", "iam", "predictive", "offline plan", "bound")
TARGETS = {"geometric mean": "all", "percentile 90": "all, percentile 90", "worst": "all, worst"}
Row = Mapping[str, Any]


def verdicts(result: Row) -> str:
    """Return our policy against its targets."""
    costs = result["cost_over_gdsf"][result["ours"]]
    rows = ((name, costs[key], result["asked"][name.replace(" ", "_")]) for name, key in TARGETS.items())
    return "\n".join(
        f"- {name}: {cost:.3f}, target at most {most}: {met(cost <= most)}." for name, cost, most in rows
    )


def families(result: Row) -> Iterator[Row]:
    """Yield the cost of each policy for each family of traces."""
    for kind, key in (("tuned on", "tuned_on"), ("held out", "held_out")):
        for family in result[key]:
            costs = {policy: of[family] for policy, of in result["cost_over_gdsf"].items()}
            yield {"name": family, "kind": kind, **costs}


def live_rows(result: Row) -> Iterator[Row]:
    """Yield what was asked of the live host, and the answer."""
    return ({"part": part, "result": found} for part, found in _live(result))


def _live(result: Row) -> Iterator[tuple[str, str]]:
    runs = result["overhead"]["throughput"]
    later = result["overhead"]["ttft_s"]["over_direct"]
    yield (
        f"first token of a running model through the gateway and directly ({later['n']} pairs)",
        f"{later['p50'] * 1e3:.1f} ms later at the median (quartiles {later['p25'] * 1e3:.1f} and"
        f" {later['p75'] * 1e3:.1f} ms)",
    )
    shown = "{p50:.2f}x (quartiles {p25:.2f} and {p75:.2f})"
    ratios = listed(f"{clients} clients {shown.format_map(one['ratio'])}" for clients, one in runs.items())
    cost = " and ".join(f"{one['gateway_cpu_s_per_token'] * 1e6:.0f}" for one in runs.values())
    holds = met(all(one["ratio"]["p50"] >= THROUGHPUT for one in runs.values()))
    yield (
        f"output tokens per second over direct, both on {result['overhead']['about']['cores']} shared cores",
        f"{ratios}; target {THROUGHPUT}: {holds}; the gateway uses {cost} µs of CPU for each token",
    )


def when(result: Row) -> str:
    """Return the models, the traces, and when they were measured."""
    each = "{trace} ({requests} requests in {seconds:.0f} s)"
    rounds = listed(map(each.format_map, result["rounds"]))
    return (
        f"{len(result['models'])} models; rounds: {rounds}; load average before {result['load_before']:.1f}; measured"
        f" {result['date']} at {result['commit']}."
    )


def policies(path: str) -> Table:
    """Return a table of the cost of each policy over that of GDSF."""
    columns = {"policy": "{name}"} | {group: f"{{{group}:.2f}}" for group in GROUPS}
    return Table(lambda result: ({"name": name, **row} for name, row in result[path].items()), columns)


TOTALS = Table(lambda result: result["totals"], {
    "policy": "{policy}", "starts": "{starts}", "seconds of starts": "{start_s:.1f}", "over LRU": "{start_s_over_lru:.2f}",
    "over LRU by round": lambda row: listed(f"{one:.2f}" for one in row["over_lru_by_round"]),
    "simulated over LRU": "{simulated_start_s_over_lru:.2f}", "hit ratio": "{hit_ratio:.2f}",
    "mean latency": "{mean_latency_s:.2f} s",
})  # fmt: skip
FAMILIES = Table(families, {"family": "{name}", "set": "{kind}", **{one: f"{{{one}:.2f}}" for one in SHOWN}})
LOADS = "{overhead[about][load_before]:.1f}"
PARTS = [
    Part(LIVE, "live-policies", "host-policies-live-cpu", (TOTALS, when), "host/live_policies"),
    Part(LIVE, "host-load", "host-live-cpu", (LOADS,), "host/live"),
    Part(
        LIVE, "host", "host-live-cpu", (Table(live_rows, {"part": "{part}", "result": "{result}"}),),
        "host/live",
    ),
    Part(PAGE, "policies", CACHE, (policies("cost_over_gdsf"),), "host/policies"),
    Part(PAGE, "verdict", CACHE, (verdicts,), "host/policies"),
    Part(PAGE, "host", CACHE, (policies("cost_over_gdsf_on_host"),), "host/policies"),
    Part(PAGE, "families", CACHE, (FAMILIES,), "host/policies"),
]  # fmt: skip
