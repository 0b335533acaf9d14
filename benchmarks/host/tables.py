"""Table of the host's gateway."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.tables import Part, Table, listed, met

PAGE, RESULT, BENCHMARK = "docs/reference/host-measurements.md", "host-live-cpu", "host/live"
# Target of the throughput through the gateway over direct.
THROUGHPUT = 0.97


def measured(result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what was asked of the live host, and the answer."""
    overhead = result["overhead"]
    runs, later = overhead["throughput"], overhead["ttft_s"]["over_direct"]
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
        f"output tokens per second over direct, both on {overhead['about']['cores']} shared cores",
        f"{ratios}; target {THROUGHPUT}: {holds}; the gateway uses {cost} µs of CPU for each token",
    )


PARTS = [
    Part(PAGE, "host-load", RESULT, ("{overhead[about][load_before]:.1f}",), BENCHMARK),
    Part(
        PAGE,
        "host",
        RESULT,
        (Table(measured, {"measured": lambda row: row[0], "result": lambda row: row[1]}),),
        BENCHMARK,
    ),
]
