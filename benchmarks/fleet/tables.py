"""Tables of the claims about many servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.tables import Part, Table, listed, met, yes

PAGE = "docs/fleet.md"
Row = Mapping[str, Any]


def fault_rows(result: Row) -> Iterator[Row]:
    """Yield the requests by kind, with the counts of each outcome."""
    for kind, told in result["requests"].items():
        named, unnamed = (
            sum(n for what, n in told.items() if what.startswith(w)) for w in ("named: ", "unnamed")
        )
        yield {"kind": kind, "right": 0, "wrong": 0, **told, "named": named, "unnamed": unnamed}


def kills(result: Row) -> str:
    """Return the number of kills by kind."""
    kinds = listed(f"{kind} {count}" for kind, count in sorted(result["killed"].items()))
    return f"{result['kills']} kills ({kinds}); load average {result['about']['load_before']:.1f}."


def partitions(result: Row) -> str:
    """Return what happened while links were cut."""
    requests = sum(told["asked"] for told in result["requests"].values())
    return (
        f"{len(result['cuts'])} cuts, {requests} requests, {result['lost']} lost.\n\n"
        f"- Longest wait for an answer or a piece of a stream: {result['slowest_s']:.2f} s; target 3 s: "
        f"{met(result['slowest_met'])}.\n"
        f"- Time until the node counted as dead: {result['dead_s']:.2f} s; target 10 s: {met(result['dead_met'])}.\n"
        f"- Both nodes served again {max(one['back_s'] for one in result['cuts']):.0f} s after the link's return at the latest."
    )


def handover(result: Row) -> str:
    """Return the gaps of the streams that moved."""
    moved = result["moved"]
    return (
        "- From two ranks to one worker: {moved} streams moved, {broken} of {streams} broken, {differ} with another token. Gap"
        " {gap[median_s]:.2f} s (median), {gap[p95_s]:.2f} s (95 %), {gap[worst_s]:.2f} s (worst); {gaps_within_bar} within"
        " {bar_s} s; target all: ".format_map(moved)
        + f"{met(moved['gap']['worst_s'] <= moved['bar_s'])}.\n"
        "- Server killed under {begun_when_killed} streams: {broken} broken, {differ} with another token; they waited"
        " {pause[median_s]:.0f} s for the next server.".format_map(result["killed"])
    )


def link_rows(result: Row) -> Iterator[Row]:
    """Yield one row for each start behind a limited link."""
    for row in result["rows"]:
        ranks = "one worker" if row["ranks"] == 1 else f"{row['ranks']} ranks"
        fetched, rest = listed(f"{s:.1f}" for s in row["fetched_s"]), row["ttft_s"] - max(row["fetched_s"])
        shares = listed(f"{share:.3f}" for share in row["shares"])
        start = f"{row['rate'] / 1e6:g} MB/s, {ranks}"
        yield {
            **row,
            "start": start,
            "fetched": fetched,
            "rest": rest,
            "share": shares,
            "off": 100 * row["error"],
        }


def link_verdicts(result: Row) -> str:
    """Return the three targets of the starts behind limited links."""
    told = result["summary"]
    ratios = listed(f"{ratio:.2f} at {float(rate) / 1e6:g} MB/s" for rate, ratio in told["ratio"].items())
    return (
        f"- First token of two ranks over one worker's: {ratios}; target {told['ratio_bar']}: {met(told['ratio_met'])}.\n"
        f"- Fetched bytes of a rank over the model's: {told['largest_share']:.3f} at most; target {told['share_bar']}: "
        f"{met(told['share_met'])}.\n"
        f"- Prediction error: {100 * told['median_error']:.0f} % (median), {100 * told['worst_error']:.0f} % (worst); target "
        f"{100 * told['error_bar']:.0f} % (median): {met(told['error_met'])}."
    )


def scale_up(result: Row) -> str:
    """Return the first tokens of a burst by a pipeline and by independent starts."""
    about, told = result["about"], result["summary"]
    return (
        f"- {len(result['rows'][0]['ttft_s'])} requests at once for a stopped model of {about['model_bytes'] / 1e6:.0f} MB, two"
        f" servers behind links of {about['rate_bytes_s'] / 1e6:g} MB/s: mean first token after {told['pipeline']:.0f} s with"
        f" a pipeline and {told['independent']:.0f} s with two independent starts;"
        f" {listed(f'{ratio:.2f}x' for ratio in told['ratios'])} by pairs; target {told['bar']}x: {met(told['met'])}."
    )


def overhead_rows(result: Row) -> Iterator[Row]:
    """Yield the commands and the cold request with their limits."""
    request = result["cold_request"]
    rows = {"a cold request beside its start": {**request, "median_s": request["overhead_median_s"]}}
    rows |= {f"`{name}`": one for name, one in result["commands"].items()}
    for name, one in rows.items():
        met_ = yes(one["met"])
        yield {"what": name, "median": 1e3 * one["median_s"], "bar": 1e3 * one["bar_s"], "met": met_}


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


def growth(result: Row) -> str:
    """Return how the cost of a simulation grows."""
    exponents = listed(f"{value:.2f}" for value in result["growth_exponents"])
    return (
        f"Exponent of the growth from row to row: {exponents}. The last row simulates "
        f"{result['simulated_seconds_per_cpu_second']:.1f} s in a second of CPU."
    )


SYSTEMS = {
    name: f"{{{name}}}" for name in ("serverless vLLM", "ServerlessLLM", "pipeline", "pipeline with cache")
}
PARTS = [
    Part(
        PAGE,
        "faults",
        "fleet-faults",
        (
            kills,
            Table(
                fault_rows,
                {
                    "request": "{kind}",
                    "sent": "{asked}",
                    "correct": "{right}",
                    "error with a reason": "{named}",
                    "wrong": "{wrong}",
                    "error without a reason": "{unnamed}",
                },
            ),
            "- Lost of the requests that can continue on another server (the first two rows): {lost_that_could_go_on}.\n"
            "- Both models served again after {both_serve_again_s[median]:.1f} s (median), {both_serve_again_s[worst]:.1f} s"
            " (worst); processes left at the end: {processes_left}.",
        ),
    ),
    Part(PAGE, "partitions", "fleet-partitions", (partitions,)),
    Part(PAGE, "handover", "fleet-handover-cpu", (handover,)),
    Part(
        PAGE,
        "links",
        "fleet-links-cpu",
        (
            Table(
                link_rows,
                {
                    "link, start": "{start}",
                    "first token (s)": "{ttft_s:.1f}",
                    "predicted (s)": "{predicted_s:.1f}",
                    "error (%)": "{off:.0f}",
                    "fetch of each rank (s)": "{fetched}",
                    "rest (s)": "{rest:.1f}",
                    "share of the model's bytes": "{share}",
                },
            ),
            link_verdicts,
        ),
    ),
    Part(PAGE, "scale-up", "fleet-scale-up-cpu", (scale_up,)),
    Part(
        PAGE,
        "overhead",
        "fleet-overhead",
        (
            Table(
                overhead_rows,
                {"what": "{what}", "median (ms)": "{median:.0f}", "limit (ms)": "{bar:.0f}", "met": "{met}"},
            ),
        ),
    ),
    Part(
        PAGE,
        "soak",
        "fleet-soak",
        (
            "- {requests[asked]} requests, {requests[right]} correct; {starts[all]} starts, {starts[median_s]:.1f} s each"
            " (median).",
            lambda result: f"- Quantities that grew: {listed(result['flat']['not_flat']) or 'none'}.",
        ),
    ),
    Part(
        PAGE,
        "policies",
        "fleet-policies",
        (
            lambda result: (
                "- `choose` against every choice of servers on {clusters:,} random clusters: ".format_map(
                    result["sizing"]
                )
                + f"{len(result['sizing']['differing'])} differ."
            ),
            "- The ledger on {ledger[runs]:,} links shared exactly: {ledger[admitted]:,} fetches admitted, {ledger[refused]:,}"
            " refused, {ledger[runs_with_a_late_worker]} runs with a fetch past its deadline.",
        ),
    ),
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
    Part(
        PAGE,
        "cost",
        "fleet-cost",
        (
            Table(
                "rows",
                {
                    "servers": "{servers:,}",
                    "models": "{models:,}",
                    "requests": "{requests:,}",
                    "starts": "{groups:,}",
                    "CPU (s)": "{cpu_s:.2f}",
                    "ms per start": "{ms_per_start:.1f}",
                },
            ),
            growth,
        ),
        "fleet/simulation_cost",
    ),
]
