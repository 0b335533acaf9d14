"""Tables of the simulated fleet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.tables import Part, listed, met

PAGE = "docs/reference/fleet-measurements.md"
Row = Mapping[str, Any]


def fit_verdicts(result: Row) -> str:
    """Return the errors of the fit to the published cold starts."""
    names = {"in_sample": "in sample, worst of 14", "left_out": "one model left out, worst"}
    return "\n".join(
        f"- {name}: {100 * result[key]['worst']:.1f} %; target {100 * result[key]['asked']:.0f} %: "
        f"{met(result[key]['worst'] <= result[key]['asked'])}."
        for key, name in names.items()
    )


def scale_verdicts(result: Row) -> str:
    """Return the times of the decisions and the size of the state."""
    cpu, state = result["cpu_ms"], result["state_bytes"]
    return (
        f"- CPU time of a decision: {cpu['p50']:.2f} ms (median), {cpu['p99']:.1f} ms (99 %), {cpu['p99.9']:.1f} ms (99.9 %), "
        f"{cpu['max']:.1f} ms (longest); target {result['limit_ms']:.0f} ms: {met(cpu['max'] <= result['limit_ms'])} "
        f"({cpu['above_limit']} of {result['decisions']:,} above).\n"
        f"- Python's collections, which visit the simulator's records too: {result['collections_ms']['max']:.0f} ms "
        "at most.\n"
        f"- State of the fleet: {state['first'] / 1e6:.1f} MB at first, {state['most'] / 1e6:.1f} MB at most, "
        f"{state['last'] / 1e6:.1f} MB at the end."
    )


GAP_S, GAP_95_S, CPU_RATIO, FAULTS = 0.15, 0.3, 0.1, 200


def move_verdicts(result: Row) -> str:
    """Return how streams moved with their KV, and what faults during moves did."""
    gap, cpu, faults = result["gap_s"], result["cpu"], result["faults"]
    holds = met(gap["median"] <= GAP_S and gap["p95"] <= GAP_95_S)
    free = max(result["free_s"].values())
    loaded = listed(
        f"{one['loaded_s']:.3f} s of {one['computed_s']:.2f} s"
        f" ({kind}, {met(one['loaded_s'] <= CPU_RATIO * one['computed_s'])})"
        for kind, one in cpu.items()
    )
    kinds = listed(f"{count} {name}" for name, count in faults.items() if " of the " in name)
    return (
        f"- {result['moved']} of {len(result['rows'])} streams moved, {result['with_kv']} with their KV,"
        f" {result['broken']} broken; vLLM loaded {sum(result['loaded_tokens'].values()):,.0f} tokens;"
        f" {result['differ']} of {result['greedy']} greedy ones have another token.\n"
        f"- Gap {gap['median']:.3f} s (median), {gap['p95']:.3f} s (95 %), {gap['max']:.2f} s (longest); target {GAP_S} s and"
        f" {GAP_95_S} s: {holds}. Load average before: {result['load_before']:.1f}.\n"
        f"- CPU of the target for 2,000 tokens, loaded instead of computed, target {CPU_RATIO:.0%}: {loaded}.\n"
        f"- {faults['made']} faults ({kinds}), target {FAULTS}: {met(faults['made'] >= FAULTS)}; {faults['lost']} streams lost,"
        f" {faults['differ']} with another token; longest wait {faults['longest_wait_s']:.1f} s.\n"
        f"- All blocks free according to vLLM {free:.1f} s after the last request at most."
    )


PARTS = [
    Part(
        PAGE,
        "cold-ttft",
        "fleet-cold-ttft",
        (
            "C = {fit[runtime_s]:.2f} s, r = {fit[first_s]:.2f} s, b = {fit[bandwidth_gb_s]:.2f} GB/s, t = {fit[rank_s]:.2f} s"
            " per rank.",
            fit_verdicts,
            "- Serverless vLLM over four workers, largest ratio: {vllm_over_four_workers[modelled]:.2f} by the fits,"
            " {vllm_over_four_workers[published]:.2f} by the published times, {vllm_over_four_workers[claimed]} claimed.",
        ),
        "fleet/cold_ttft",
    ),
    Part(PAGE, "moves", "fleet-moves-cpu", (move_verdicts,), "fleet/moves"),
    Part(
        PAGE,
        "scale",
        "fleet-scale-simulated",
        (
            "{servers:,} servers, {models:,} models, {hours:.0f} hours: {requests:,} requests, {counts[starts]:,} starts,"
            " {failed:,} failed requests, simulated in {run_s} s.",
            scale_verdicts,
        ),
        "fleet/scale",
    ),
]
