"""Figures of the FastServe paper beside ours, with a verdict that follows from the result files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.tables import Part, listed, span

PAGE = "benchmarks/SCHEDULING.md"
ALPHA = "60 s"
"""The starvation limit that the results are stated with."""
OURS, NAIVE = "skip-join-mlfq", "naive-mlfq"
Row = Mapping[str, Any]


def averages(result: Row) -> str:
    """Return the averages of Figure 7, and by grid the one that is off."""
    paper, best = result["paper"], result["best"]
    found, nearest = best["averages"], [rows[0]["averages"] for rows in result["closest_by_step"]]
    # Equal as far as the paper prints its digits.
    off = [name for name, wanted in paper.items() if round(found[name], _decimals(wanted)) != wanted]
    grids = (f"{name} comes to {listed(f'{one[name]:.2f}' for one in nearest)}" for name in off)
    verdict = f"not exact: on the grids tried {'; '.join(grids)}" if off else "exact"
    jobs = listed(f"({prefill:g}, {decode:g})" for prefill, decode in best["jobs_T1_T2"])
    return (
        f"- **Figure 7.** Paper: averages {listed(f'{x:g}' for x in paper.values())} ({listed(paper)}). Here: "
        f"{listed(f'{found[name]:.2f}' for name in paper)} with (T1, T2) = {jobs}; {verdict}."
    )


def memory(result: Row) -> str:
    """Return the ratios of the peak KV memory of Figure 8."""
    rows = result["rows"]
    batches, seeds = (dict.fromkeys(row[name] for row in rows) for name in ("batch", "seed"))
    return (
        f"- **Figure 8.** Paper: KV memory of MLFQ up to {result['paper_ratio']:g}x that of FCFS. Here: "
        f"{span((row['ratio'] for row in rows), '.1f')} over batches {listed(batches)} and {len(seeds)} seeds."
    )


def rates(result: Row) -> str:
    """Return the rates sustained in Figure 11 over both baselines, and which curves did not reach the limit."""
    (low, high), models = result["paper_over_fcfs"], result["models"]
    gain = {one["model"]: one["ours_over"]["fcfs"] for one in models}
    reached = [name for name, ratio in gain.items() if ratio >= low]
    verdict = f"reproduced for {listed(reached)}" if reached else "**not reproduced**"
    largest = listed(f"{one['ours_over']['fcfs-largest-batch']:.2f}x" for one in models)
    slower = listed(f"{_last(one, OURS) / _last(one, 'fcfs-largest-batch'):.1f}x" for one in models)
    return (
        f"- **Figure 11.** Paper: {low} to {high}x the rate of the same engine's FCFS within {result['slo_s']:g} s per token."
        f" Here: {listed(f'{ratio:.2f}x ({name})' for name, ratio in gain.items())}: {verdict} on the Azure lengths; {largest}"
        f" the rate of FCFS with the largest batch, and {slower} its latency at the last rate tried{_open(result)}."
    )


def _open(result: Row) -> str:
    """Return the curves that are still within the limit at the last rate tried."""
    ended = [
        f"{name} ({one['model']})"
        for one in result["models"]
        for name, points in one["curves"].items()
        if points[-1][1] <= result["slo_s"]
    ]
    return f"; still within {result['slo_s']:g} s there: {listed(ended)}" if ended else ""


def orders(result: Row) -> str:
    """Return what Figure 14 shows about tails, naive MLFQ and the starvation limit."""
    rows, best = result["rows"], result["paper_most"]
    naive = {ratio: max(_ratio(row, _patient(NAIVE), _patient(OURS)) for row in rows if row["ratio"] == ratio)
             for ratio in dict.fromkeys(row["ratio"] for row in rows)}  # fmt: skip
    better = sum(_ratio(row, OURS, _patient(OURS)) > 1 for row in rows)
    lines = [
        f"- **Figure 14.** Paper: skip-join up to {listed(f'{most:g}x over {name}' for name, most in best.items())}. Here, with"
        f" alpha {ALPHA}:",
        *(_tail(result, source) for source in result["cv_of_outputs"]),
        "  - Skip-join over naive MLFQ, at most, by input / output length: "
        f"{listed(f'{ratio:g}: {most:.1f}x' for ratio, most in naive.items())}.",
        f"  - The limit of {ALPHA} was better than the tempered limit in {better} of {len(rows)} cells.",
    ]
    return "\n".join(lines)


def _tail(result: Row, source: str) -> str:
    found, tempered = _best(result, source), _over(result, source, "fcfs", OURS)
    over, most = found["fcfs"], listed(f"{max(ratios):.1f}x" for ratios in found.values())
    reached = [name for name, best in result["paper_most"].items() if max(found[name]) >= best]
    return (
        f"  - {source} lengths (coefficient of variation {result['cv_of_outputs'][source]:.2f}): up to {most}; {span(over)}"
        f" over FCFS, above 1 in {sum(ratio > 1 for ratio in over)} of {len(over)} cells, with the tempered limit"
        f" {span(tempered)}; the paper's ratios are reached over: {listed(reached) or 'none'}."
    )


def strategies(result: Row) -> str:
    """Return what Figure 15 shows about swapping strategies, the starvation limit and the link."""
    paper, bound = result["paper"], result["paper"]["swapping_percent"]
    rows = [row for row in result["rows"] if row["alpha"] == ALPHA]
    shares, displaced = (
        [row["proactive_percent"][name] for row in rows] for name in ("swapping", "displaced")
    )
    over = {name: span((row[f"over_{name}"] for row in rows), ".1f") for name in ("recompute", "reactive")}
    above = sum(share > bound for share in shares)
    verdict = (
        f"**above the paper's bound at {above} of {len(rows)} loads**"
        if above
        else "within the paper's bound"
    )
    links = [row for row in result["links"] if not row.get("write_through")]
    lines = [
        f"- **Figure 15.** Paper: proactive {paper['over_recompute']:g}x over recompute, {paper['over_reactive']:g}x over"
        f" reactive, swapping below {bound:g} %. Here, with alpha {ALPHA} at loads"
        f" {span((row['load'] for row in rows), '.1f', '')}: {over['recompute']} and {over['reactive']}; swapping"
        f" {span(shares, '.0f', '')} % of latency: {verdict}; displaced {span(displaced, '.0f', '')} %.",
        *(_alphas(result, one) for one in result["papers_alpha"]),
        "  - Proactive over reactive, by the link: "
        f"{listed('{link_gb_s:g} GB/s {over_reactive:.1f}x'.format_map(row) for row in links)}.",
    ]
    return "\n".join(lines)


def _alphas(result: Row, paper: Row) -> str:
    same = [paper, *(row for row in result["rows"] if row["load"] == paper["load"])]
    shown = ("{alpha} {over_recompute:.1f}x and {over_reactive:.1f}x".format_map(row) for row in same)
    return (
        f"  - Proactive over recompute and reactive at load {paper['load']:g}, by alpha: {'; '.join(shown)}."
    )


def _best(result: Row, source: str) -> dict[str, list[float]]:
    """Return Figure 14's ratios over the policies that the paper names, with `ALPHA` where a policy has a limit."""
    name = {NAIVE: _patient(NAIVE)}
    return {one: _over(result, source, name.get(one, one), _patient(OURS)) for one in result["paper_most"]}


def _over(result: Row, source: str, other: str, ours: str) -> list[float]:
    return [_ratio(row, other, ours) for row in result["rows"] if row["lengths"] == source]


def _ratio(row: Row, other: str, ours: str) -> float:
    return float(row["s_per_token"][other] / row["s_per_token"][ours])


def _last(model: Row, system: str) -> float:
    points: Sequence[Any] = model["curves"][system]
    return float(points[-1][1])


def _patient(policy: str) -> str:
    return f"{policy}, alpha {ALPHA}"


def _decimals(printed: float) -> int:
    return len(f"{printed:g}".partition(".")[2])


FIGURES = {7: averages, 8: memory, 11: rates, 14: orders, 15: strategies}
PARTS = [
    Part(PAGE, f"figure{number}", f"figure{number}", (text,), f"scheduling/figures --figure {number}")
    for number, text in FIGURES.items()
]
