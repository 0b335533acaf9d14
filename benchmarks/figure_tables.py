"""The paper's figures beside ours as Markdown, for SCHEDULING.md.

Invariant: every figure and every verdict comes from a result file, so that a rerun leaves no sentence untrue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import scheduling_tables
from scheduling_tables import Cell

ALPHA = "60 s"
"""The starvation limit that the results are stated with."""
OURS, NAIVE = "skip-join-mlfq", "naive-mlfq"


def parts() -> dict[str, str]:
    """Each marked part of SCHEDULING.md by its name."""
    table = scheduling_tables.table(("figure", "the paper", "here", "command"), figures())
    return {
        "paper-figures": "\n".join(table),
        "paper-orders": scheduling_tables.filled("figure14", _command(14), orders),
        "paper-swapping": scheduling_tables.filled("figure15", _command(15), swapping),
    }


def figures() -> Iterator[Sequence[object]]:
    """One row per figure: what the paper says, what was found, and how."""
    judged: dict[int, Callable[[Any], tuple[str, str]]] = {
        7: averages,
        8: memory,
        11: rates,
        14: largest,
        15: strategies,
    }
    for number, judge in judged.items():
        result = scheduling_tables.held(f"figure{number}")
        paper, here = judge(result) if result else ("", "not measured yet")
        yield number, paper, here, f"`{_command(number)}`"


def averages(result: Cell) -> tuple[str, str]:
    """Figure 7: the averages of the closest job times; what is off, by grid."""
    paper, best = result["paper"], result["best"]
    found, nearest = best["averages"], [rows[0]["averages"] for rows in result["closest_by_step"]]
    # Equal as far as the paper prints its digits.
    off = [name for name, wanted in paper.items() if round(found[name], _decimals(wanted)) != wanted]
    grids = (f"{name} comes to {listed(f'{one[name]:.2f}' for one in nearest)}" for name in off)
    verdict = f"not exact: on the grids tried {'; '.join(grids)}" if off else "exact"
    jobs = listed(f"({prefill:g}, {decode:g})" for prefill, decode in best["jobs_T1_T2"])
    shown = f"{listed(f'{found[name]:.2f}' for name in paper)} with (T1, T2) = {jobs}; {verdict}"
    return f"averages {listed(f'{x:g}' for x in paper.values())} ({listed(paper)})", shown


def memory(result: Cell) -> tuple[str, str]:
    """Figure 8: the range of the ratios of peak KV memory."""
    rows = result["rows"]
    batches, seeds = (unique(row[name] for row in rows) for name in ("batch", "seed"))
    paper = f"KV of MLFQ up to {result['paper_ratio']:g}x FCFS"
    return (
        paper,
        f"{span([row['ratio'] for row in rows], 1)} over batches {listed(batches)} and {len(seeds)} seeds",
    )


def rates(result: Cell) -> tuple[str, str]:
    """Figure 11: the rates sustained over both baselines, and where the rates tried did not suffice."""
    (low, high), models = result["paper_over_fcfs"], result["models"]
    gain = {one["model"]: one["ours_over"]["fcfs"] for one in models}
    paper = f"{low} to {high}x the rate of the same engine's FCFS within {result['slo_s']:g} s per token"
    met = [name for name, ratio in gain.items() if ratio >= low]
    verdict = f"reproduced for {listed(met)}" if met else "**not reproduced**"
    largest = listed(f"{one['ours_over']['fcfs-largest-batch']:.2f}x" for one in models)
    slower = listed(f"{_last(one, OURS) / _last(one, 'fcfs-largest-batch'):.1f}x" for one in models)
    ended = [
        f"{name} ({one['model']})"
        for one in models
        for name, points in one["curves"].items()
        if points[-1][1] <= result["slo_s"]
    ]
    open_end = f"; still within {result['slo_s']:g} s there: {listed(ended)}" if ended else ""
    shown = listed(f"{ratio:.2f}x ({name})" for name, ratio in gain.items())
    return paper, (
        f"{shown}: {verdict} on the Azure lengths; {largest} the rate of FCFS with the largest batch, and at the"
        f" last rate tried {slower} its latency{open_end}"
    )


def largest(result: Cell) -> tuple[str, str]:
    """Figure 14: the best ratio over each policy, by lengths."""
    over = listed(f"{ratio:g}x over {name}" for name, ratio in result["paper_most"].items())
    found = (
        f"{source} lengths {listed(f'{max(ratios):.1f}x' for ratios in _best(result, source).values())}"
        for source in result["cv_of_outputs"]
    )
    return f"skip-join up to {over}", f"alpha {ALPHA}, up to: {'; '.join(found)}"


def strategies(result: Cell) -> tuple[str, str]:
    """Figure 15: proactive swapping over the other strategies, and its share of the latency."""
    paper, rows = result["paper"], [row for row in result["rows"] if row["alpha"] == ALPHA]
    over = {way: span([row[f"over_{way}"] for row in rows], 1) for way in ("recompute", "reactive")}
    shares, bound = [row["proactive_percent"]["swapping"] for row in rows], paper["swapping_percent"]
    displaced = [row["proactive_percent"]["displaced"] for row in rows]
    above = sum(share > bound for share in shares)
    verdict = (
        f"**above the paper's bound at {above} of {len(rows)} loads**"
        if above
        else "within the paper's bound"
    )
    said = f"proactive {paper['over_recompute']:g}x over recompute, {paper['over_reactive']:g}x over reactive"
    return f"{said}, swapping below {bound:g} %", (
        f"alpha {ALPHA}, loads {span([row['load'] for row in rows], 1, '')}: {over['recompute']} and"
        f" {over['reactive']}; swapping {span(shares, 0, '')} % of latency: {verdict}; on the host for want of room, though"
        f" its rank earns a slot, {span(displaced, 0, '')} %"
    )


def orders(result: Cell) -> Iterator[str]:
    """What figure 14 says about tails, naive MLFQ, and the starvation limit."""
    yield from (_tail(result, source) for source in result["cv_of_outputs"])
    rows = result["rows"]
    naive = (f"{ratio:g}: {_over_naive(rows, ratio):.1f}x" for ratio in unique(row["ratio"] for row in rows))
    yield f"- **Skip-join over naive MLFQ**, at most, by input / output length: {listed(naive)}."
    better = sum(_ratio(row, OURS, _patient(OURS)) > 1 for row in rows)
    yield (
        f"- **The starvation limit**: {ALPHA} was better than the tempered limit in {better} of"
        f" {len(rows)} cells of figure 14."
    )


def _tail(result: Cell, source: str) -> str:
    found, tempered = _best(result, source), _over(result, source, "fcfs", OURS)
    over, spread = found["fcfs"], result["cv_of_outputs"][source]
    reached = [name for name, best in result["paper_most"].items() if max(found[name]) >= best]
    return (
        f"- **The tail, {source} lengths** (outputs' coefficient of variation {spread:.2f}): {span(over)} over FCFS,"
        f" ahead in {sum(ratio > 1 for ratio in over)} of {len(over)} cells; with the tempered limit {span(tempered)}."
        f" The paper's ratios are reached over: {listed(reached) or 'none'}."
    )


def _over_naive(rows: Sequence[Cell], ratio: float) -> float:
    return max(_ratio(row, _patient(NAIVE), _patient(OURS)) for row in rows if row["ratio"] == ratio)


def swapping(result: Cell) -> Iterator[str]:
    """What figure 15 says about the starvation limit and the link."""
    for paper in result["papers_alpha"]:
        same = [paper, *(row for row in result["rows"] if row["load"] == paper["load"])]
        shown = (
            f"{row['alpha']} {row['over_recompute']:.1f}x and {row['over_reactive']:.1f}x" for row in same
        )
        yield f"- **Proactive over recompute and reactive, by alpha**, at load {paper['load']:g}: {'; '.join(shown)}."
    links = [row for row in result["links"] if not row["write_through"]]
    speeds = (f"{row['link_gb_s']:g} GB/s {row['over_reactive']:.1f}x" for row in links)
    loads = listed(f"{load:g}" for load in unique(row["load"] for row in links))
    yield f"- **Proactive over reactive, by the link**, at load {loads}: {listed(speeds)}."


def _best(result: Cell, source: str) -> dict[str, list[float]]:
    """Figure 14's ratios over the policies that the paper names, with `ALPHA` where a policy has a limit."""
    name = {NAIVE: _patient(NAIVE)}
    return {one: _over(result, source, name.get(one, one), _patient(OURS)) for one in result["paper_most"]}


def _over(result: Cell, source: str, other: str, ours: str) -> list[float]:
    return [_ratio(row, other, ours) for row in result["rows"] if row["lengths"] == source]


def _ratio(row: Cell, other: str, ours: str) -> float:
    return float(row["s_per_token"][other] / row["s_per_token"][ours])


def _last(model: Cell, system: str) -> float:
    return float(model["curves"][system][-1][1])


def _patient(policy: str) -> str:
    return f"{policy}, alpha {ALPHA}"


def _command(number: int) -> str:
    return f"python benchmarks/figure{number}.py"


def _decimals(printed: float) -> int:
    return len(f"{printed:g}".partition(".")[2])


def span(values: Sequence[float], digits: int = 2, unit: str = "x") -> str:
    """The least and the largest."""
    return f"{min(values):.{digits}f}{unit} to {max(values):.{digits}f}{unit}"


def listed(values: Iterable[object]) -> str:
    """With commas."""
    return ", ".join(map(str, values))


def unique(values: Iterable[Any]) -> list[Any]:
    """Each once, in order."""
    return list(dict.fromkeys(values))
