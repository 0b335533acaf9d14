"""Tables of the eviction policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.tables import Part, Table, listed, met

PAGE, LIVE, CACHE = (
    "benchmarks/MODEL_CACHE.md", "docs/reference/host-measurements.md", "model-cache-simulated"
)  # fmt: skip
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


def live_rows(result: Row) -> Iterator[tuple[str, str]]:
    """Yield what was asked of the live host, and the answer."""
    cold, runs = result["cold"], result["overhead"]["throughput"]
    later = result["overhead"]["ttft_s"]["over_direct"]
    yield (
        f"`cold`: {cold['requests']} requests to a stopped model",
        "{starts} start ({start[seconds]:.1f} s until ready, `{start[mode]}`), {answered} answered, {seen_by_server}"
        " received by vLLM, {out_of_order_at_server} out of order".format_map(cold),
    )
    yield (
        f"`overhead`: first token of a running model through the gateway and directly ({later['n']} pairs)",
        f"{later['p50'] * 1e3:.1f} ms later at the median (quartiles {later['p25'] * 1e3:.1f} and"
        f" {later['p75'] * 1e3:.1f} ms)",
    )
    shown = "{p50:.2f}x (quartiles {p25:.2f} and {p75:.2f})"
    ratios = listed(f"{clients} clients {shown.format_map(one['ratio'])}" for clients, one in runs.items())
    cost = " and ".join(f"{one['gateway_cpu_s_per_token'] * 1e6:.0f}" for one in runs.values())
    holds = met(all(one["ratio"]["p50"] >= THROUGHPUT for one in runs.values()))
    yield (
        f"`overhead`: output tokens per second over direct, both on {result['overhead']['about']['cores']} shared cores",
        f"{ratios}; target {THROUGHPUT}: {holds}; the gateway uses {cost} µs of CPU for each token",
    )


def when(result: Row) -> str:
    """Return the models, the traces, and when they were measured."""
    rounds = listed(
        f"{one['trace']} ({one['requests']} requests in {one['seconds']:.0f} s)" for one in result["rounds"]
    )
    return (
        f"{len(result['models'])} models; rounds: {rounds}; load average before {result['load_before']:.1f}; measured"
        f" {result['date']} at {result['commit']}."
    )


def compare_live(result: Row) -> str:
    """Return the default policy against each other one, and what the simulation of the same traces says."""
    of = {row["policy"]: row for row in result["totals"]}
    ours = of.pop("predictive")
    ratios = {name: ours["start_s"] / row["start_s"] for name, row in of.items()}
    lost = listed(name for name, ratio in ratios.items() if ratio > 1) or "none"
    return (
        "Start times of the default, `predictive`, over those of the others: "
        f"{listed(f'{name} {ratio:.2f}' for name, ratio in ratios.items())}. It loses to {lost} here;"
        f" {len(result['rounds'])} rounds do not decide a difference of this size. Simulated on the same traces, it has"
        f" {ours['simulated_start_s_over_lru']:.2f} of LRU's."
    )


def policies(path: str) -> Table:
    """Return a table of the cost of each policy over that of GDSF."""
    columns = {group: f"{{{group}:.2f}}" for group in GROUPS}
    return Table(
        lambda result: ({"name": name, **row} for name, row in result[path].items()),
        {"policy": "{name}", **columns},
    )


SHORT = Table(
    lambda result: result["rows"],
    {
        "estimates": "{estimates}",
        "trace": "{trace}",
        **{name: f"{{cost_over_lru[{name}]:.2f}}" for name in ("lru", "gdsf", "iam", "predictive")},
        "traces on which predictive costs less, more": "{better}, {worse} of {seeds}",
        "standard deviation of predictive over LRU": "{deviation:.2f}",
    },
)
TOTALS = Table(
    lambda result: result["totals"],
    {
        "policy": "{policy}",
        "starts": "{starts}",
        "seconds of starts": "{start_s:.1f}",
        "over LRU": "{start_s_over_lru:.2f}",
        "over LRU by round": lambda row: listed(f"{one:.2f}" for one in row["over_lru_by_round"]),
        "simulated over LRU": "{simulated_start_s_over_lru:.2f}",
        "hit ratio": "{hit_ratio:.2f}",
        "mean latency": "{mean_latency_s:.2f} s",
    },
)
FAMILIES = Table(families, {"family": "{name}", "set": "{kind}", **{one: f"{{{one}:.2f}}" for one in SHOWN}})
LOADS = "{cold[about][load_before]:.1f} in `cold`, {overhead[about][load_before]:.1f} in `overhead`"
PARTS = [
    Part(LIVE, "live-policies", "host-policies-live-cpu", (TOTALS, compare_live, when), "host/live_policies"),
    Part(LIVE, "short-traces", "host-short-traces", (SHORT,), "host/short_traces"),
    Part(LIVE, "host-load", "host-live-cpu", (LOADS,), "host/live"),
    Part(
        LIVE,
        "host",
        "host-live-cpu",
        (Table(live_rows, {"part": lambda row: row[0], "result": lambda row: row[1]}),),
        "host/live",
    ),
    Part(PAGE, "policies", CACHE, (policies("cost_over_gdsf"),), "host/policies"),
    Part(PAGE, "verdict", CACHE, (verdicts,), "host/policies"),
    Part(PAGE, "host", CACHE, (policies("cost_over_gdsf_on_host"),), "host/policies"),
    Part(PAGE, "families", CACHE, (FAMILIES,), "host/policies"),
]
