"""Figures of the FastServe paper beside ours, with a verdict that follows from the result files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.tables import Part, Table, listed, met, span

PAGE = "benchmarks/SCHEDULING.md"
# The starvation limit that the results are stated with.
PATIENT = ", alpha 60 s"
OURS, NAIVE = "skip-join-mlfq", "naive-mlfq"
Row = Mapping[str, Any]


def memory(result: Row) -> str:
    """Return the ratios of the peak KV memory of Figure 8."""
    rows = result["rows"]
    batches, seeds = (dict.fromkeys(row[name] for row in rows) for name in ("batch", "seed"))
    return (
        f"- **Figure 8.** Paper: KV memory of MLFQ up to {result['paper_ratio']:g}x that of FCFS. Here: "
        f"{span((row['ratio'] for row in rows), '.1f')} over batches {listed(batches)} and {len(seeds)} seeds."
    )


def rates(result: Row) -> str:
    """Return the verdict on the rates of Figure 11."""
    low, high = result["paper_over_fcfs"]
    reached = any(model["ours_over"]["fcfs"] >= low for model in result["models"])
    return (
        f"- **Figure 11.** Rate within {result['slo_s']:g} s per token over FCFS. Paper: {low} to {high}x. Here, on the Azure "
        f"lengths: {met(reached)}."
    )


def rate_rows(result: Row) -> Iterator[Row]:
    """Yield the rates of each model of Figure 11, and the latency at the last rate tried."""
    for model in result["models"]:
        last = {name: points[-1][1] for name, points in model["curves"].items()}
        within = listed(name for name, seconds in last.items() if seconds <= result["slo_s"])
        yield {**model, "slower": last[OURS] / last["fcfs-largest-batch"], "within": within}


def order_rows(result: Row) -> Iterator[Row]:
    """Yield how much shorter a token takes in Figure 14 with skip-join MLFQ, by lengths and policy."""
    for source, spread in result["cv_of_outputs"].items():
        rows = [row["s_per_token"] for row in result["rows"] if row["lengths"] == source]
        for name, paper in result["paper_most"].items():
            other = name + PATIENT if name == NAIVE else name
            over = [row[other] / row[OURS + PATIENT] for row in rows]
            above = f"{sum(ratio > 1 for ratio in over)} of {len(over)}"
            yield {"lengths": f"{source} ({spread:.2f})", "over": name, "paper": paper, "above": above,
                   "ours": span(over), "reached": met(max(over) >= paper)}  # fmt: skip


def tempered(result: Row) -> str:
    """Return how the starvation limit of the results compares with the tempered one."""
    rows = [row["s_per_token"] for row in result["rows"]]
    better = sum(row[OURS] > row[OURS + PATIENT] for row in rows)
    return f"The limit of 60 s was better than the tempered limit in {better} of {len(rows)} cells."


def strategies(result: Row) -> str:
    """Return what the paper states in Figure 15."""
    return (
        "- **Figure 15.** Paper: proactive {over_recompute:g}x over recompute, {over_reactive:g}x over reactive, swapping below"
        " {swapping_percent:g} % of the latency. Here:"
    ).format_map(result["paper"])


ORDERS = Table(order_rows, {
    "lengths (coefficient of variation)": "{lengths}", "skip-join over": "{over}", "paper, at most": "{paper:g}x",
    "ours": "{ours}", "cells above 1": "{above}", "the paper's ratio": "{reached}",
})  # fmt: skip
RATES = Table(rate_rows, {
    "model": "{model}", "over FCFS": "{ours_over[fcfs]:.2f}x",
    "over FCFS with the largest batch": "{ours_over[fcfs-largest-batch]:.2f}x",
    "its latency at the last rate": "{slower:.1f}x", "still within the limit there": "{within}",
})  # fmt: skip
STRATEGIES = Table(lambda result: [*result["rows"], *result["links"], *result["papers_alpha"]], {
    "alpha": "{alpha}", "load": "{load:g}", "link (GB/s)": "{link_gb_s:g}",
    "proactive over recompute": "{over_recompute:.1f}x", "over reactive": "{over_reactive:.1f}x",
    "swapping": "{proactive_percent[swapping]:.0f} %", "displaced": "{proactive_percent[displaced]:.0f} %",
})  # fmt: skip
HEAD = "- **Figure 14.** Time per token of other orders over skip-join MLFQ; both MLFQ have an alpha of 60 s:"
FIGURES = {8: (memory,), 11: (rates, RATES), 14: (HEAD, ORDERS, tempered), 15: (strategies, STRATEGIES)}
PARTS = [
    Part(PAGE, f"figure{number}", f"figure{number}", blocks, f"scheduling/figures --figure {number}")
    for number, blocks in FIGURES.items()
]
