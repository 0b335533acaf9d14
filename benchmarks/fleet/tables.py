"""Tables of the live fleet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.fleet import paper_tables
from benchmarks.tables import Part, Table, listed, met

PAGE = "docs/reference/fleet-measurements.md"
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
        "soak",
        "fleet-soak",
        (
            "- {requests[asked]} requests, {requests[right]} correct; {starts[all]} starts, {starts[median_s]:.1f} s each"
            " (median).",
            lambda result: f"- Quantities that grew: {listed(result['flat']['not_flat']) or 'none'}.",
        ),
    ),
    *paper_tables.PARTS,
]
