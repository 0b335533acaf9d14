"""Tables of the simulated fleet beside ParaServe's published figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.tables import Part, Table, listed, met

PAGE = "docs/reference/fleet-measurements.md"
Row = Mapping[str, Any]


def attainment_rows(result: Row) -> Iterator[Row]:
    """Yield the attainment of each system for each load, with the published figure."""
    cells: dict[tuple[float, float], dict[str, str]] = {}
    for row in result["rows"]:
        shown = f"{row['ttft_attainment']} ({row['published']})"
        cells.setdefault((row["cv"], row["rps"]), {})[row["system"]] = shown
    yield from ({"load": f"{cv}, {rps}", **systems} for (cv, rps), systems in cells.items())


def attainment_verdicts(result: Row) -> str:
    """Return how the simulation compares with the published figures."""
    gain = result["pipeline_over_vllm"]
    off = listed(f"{name} {value:.1f}" for name, value in result["mean_absolute_error_points"].items())
    return (
        f"- The published order in {result['ordered_cells']} of {result['cells']} cells.\n"
        f"- Pipeline over serverless vLLM: {gain['simulated_least']:.2f} to {gain['simulated_most']:.2f}; published "
        f"{gain['claimed']}: {met(gain['simulated_most'] >= gain['claimed'])}.\n"
        f"- Mean difference from the published figures, in points: {off}."
    )


def sensitivity_rows(result: Row) -> Iterator[Row]:
    """Yield the attainment by the skew of popularity and the factor of the runtime."""
    for one in result["sensitivity"]:
        order = "yes" if one["ordered"] else "no"
        yield {
            "load": f"{one['skew']}, {one['runtime']}",
            **one["attainment"],
            "order": order,
            "gain": one["gain"],
        }


def fit_verdicts(result: Row) -> str:
    """Return the errors of the fit to the published cold starts."""
    names = {"in_sample": "in sample, worst of 14", "left_out": "one model left out, worst"}
    return "\n".join(
        f"- {name}: {100 * result[key]['worst']:.1f} %; target {100 * result[key]['asked']:.0f} %: "
        f"{met(result[key]['worst'] <= result[key]['asked'])}."
        for key, name in names.items()
    )


SYSTEMS = {
    name: f"{{{name}}}" for name in ("serverless vLLM", "ServerlessLLM", "pipeline", "pipeline with cache")
}
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
    Part(
        PAGE,
        "end-to-end",
        "fleet-end-to-end-simulated",
        (Table(attainment_rows, {"CV, requests/s": "{load}", **SYSTEMS}), attainment_verdicts),
        "fleet/end_to_end",
    ),
    Part(
        PAGE,
        "sensitivity",
        "fleet-end-to-end-simulated",
        (
            Table(
                sensitivity_rows,
                {
                    "skew, runtime": "{load}",
                    **SYSTEMS,
                    "published order": "{order}",
                    "pipeline over vLLM": "{gain:.2f}",
                },
            ),
        ),
        "fleet/end_to_end",
    ),
]
