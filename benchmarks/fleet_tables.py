"""The fleet's results as Markdown, for docs/fleet.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def parts() -> dict[str, str]:
    return {
        "policies": policies(_read("fleet-policies")),
        "cold-ttft": cold_ttft(_read("fleet-cold-ttft")),
        "end-to-end": end_to_end(_read("fleet-end-to-end-simulated")),
        "sensitivity": sensitivity(_read("fleet-end-to-end-simulated")),
        "cost": cost(_read("fleet-cost")),
        "faults": faults(_read("fleet-faults")),
        "partitions": partitions(_read("fleet-partitions")),
        "overhead": overhead(_read("fleet-overhead")),
        "handover": handover(_read("fleet-handover-cpu")),
        "links": links(_read("fleet-links-cpu")),
        "scale-up": scale_up(_read("fleet-scale-up-cpu")),
        "soak": soak(_read("fleet-soak")),
    }


def _read(name: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / f"{name}.json").read_text()))


def _table(headers: list[str], rows: list[list[str]]) -> str:
    lines = [headers, ["---", *["---:"] * (len(headers) - 1)], *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def policies(found: Mapping[str, Any]) -> str:
    sizing, ledger = found["sizing"], found["ledger"]
    return (
        f"- `choose` against every choice of servers on {sizing['clusters']:,} random clusters: "
        f"{len(sizing['differing'])} differ.\n"
        f"- The ledger on {ledger['runs']:,} links shared exactly: {ledger['admitted']:,} fetches admitted, "
        f"{ledger['refused']:,} refused, {ledger['runs_with_a_late_worker']} runs with one past its deadline; "
        f"bytes lost or invented: {ledger['bytes_lost_relative']:.0e} of all at most."
    )


def soak(found: Mapping[str, Any]) -> str:
    flat, about, asked, starts = (found[name] for name in ("flat", "about", "requests", "starts"))

    def of(name: str, unit: int = 1) -> str:
        one = flat["quantities"][name]
        return f"{one['second_third'] / unit:,.0f}, {one['last_third'] / unit:,.0f}"

    rows = []
    for role in [
        name.removesuffix(" processes") for name in flat["quantities"] if name.endswith(" processes")
    ]:
        counts = [of(f"{role} {what}") for what in ("processes", "descriptors", "threads")]
        slope = flat["quantities"][f"{role} pss_bytes"]["slope_an_hour"] / (1 << 20)
        rows.append([role, *counts, of(f"{role} pss_bytes", 1 << 20), f"{slope:+.1f}"])
    table = _table(
        ["role", "processes", "descriptors", "threads", "PSS (MiB)", "its slope (MiB an hour)"], rows
    )
    files = ", ".join(f"{name}: {of(f'{name}_files')}" for name in ("runtime", "cache", "state"))
    written = flat["quantities"]["runtime_bytes"]["slope_an_hour"] / 1e6
    minutes, failed = found["samples"][-1]["at_s"] / 60, sum(asked["errors"].values())
    return (
        f"{minutes:.0f} minutes at {about['speed']:g} times the trace's speed, {about['models']} models "
        f"in room for {about['room_for']}; the machine's load was {about['load_median']:.1f} (median).\n\n"
        f"- Requests: {asked['asked']:,}, of these right {asked['right']:,}, wrong {asked.get('wrong', 0)}, "
        f"refused or failed {failed}; starts: {starts['all']:,}, {starts['median_s']:.1f} s each (median).\n"
        f"- Not flat: {', '.join(flat['not_flat']) or 'nothing'}.\n"
        f"- Files below the directories: {files}; segments in /dev/shm: {of('segments')}.\n"
        f"- Bytes below the runtime directories, most of them in logs of Ray's own: {written:+.1f} MB an hour.\n\n"
        f"Medians of the second third and of the last one, of servers and supervisors by resident:\n\n{table}"
    )


def faults(found: Mapping[str, Any]) -> str:
    killed = ", ".join(f"{kind} {count}" for kind, count in sorted(found["killed"].items()))
    rows = []
    for kind, told in found["requests"].items():
        named = sum(count for what, count in told.items() if what.startswith("named: "))
        others = [told.get("right", 0), named, told.get("wrong", 0)]
        unnamed = sum(count for what, count in told.items() if what.startswith("unnamed"))
        rows.append([kind, *(str(count) for count in (told["asked"], *others, unnamed))])
    table = _table(["asked for", "requests", "right", "an error that says so", "wrong", "unnamed"], rows)
    again = found["both_serve_again_s"]
    return (
        f"{found['kills']} kills ({killed}); the machine's load was {found['about']['load_before']:.1f} before.\n\n{table}\n\n"
        f"- Lost of what can go on elsewhere (the first two rows): {found['lost_that_could_go_on']}.\n"
        f"- Both models served again after {again['median']:.1f} s (median), {again['worst']:.1f} s at worst; "
        f"processes left at the end: {found['processes_left']}."
    )


def partitions(found: Mapping[str, Any]) -> str:
    about, asked = found["about"], sum(told["asked"] for told in found["requests"].values())
    loads = f"{about['load_before']:.1f} before, {about['load_after']:.1f} after"
    back_s = max(one["back_s"] for one in found["cuts"])
    waited, dead = (
        f"{found[name]:.2f} s, asked for {bar} s: {'met' if found[met] else '**missed**'}"
        for name, met, bar in (("slowest_s", "slowest_met", 3), ("dead_s", "dead_met", 10))
    )
    return (
        f"{len(found['cuts'])} cuts, {asked} requests; the machine's load was {loads}.\n\n"
        f"- Requests lost: {found['lost']}.\n"
        f"- Longest wait for an answer or a piece of a stream during a cut: {waited}.\n"
        f"- The node was dead after at most {dead}.\n"
        f"- Both nodes served again at most {back_s:.0f} s after the link's return."
    )


def handover(found: Mapping[str, Any]) -> str:
    moved, killed = found["moved"], found["killed"]
    gap = moved["gap"]
    met = "met" if gap["worst_s"] <= moved["bar_s"] else "**missed**"
    return (
        f"- From two ranks to one worker: {moved['moved']} streams moved, {moved['broken']} of {moved['streams']} broken, "
        f"{moved['differ']} with another token. Gap {gap['median_s']:.2f} s (median), {gap['p95_s']:.2f} s (95 %), "
        f"{gap['worst_s']:.2f} s at worst; {moved['gaps_within_bar']} within the {moved['bar_s']} s asked for: {met}.\n"
        f"- The server killed under {killed['begun_when_killed']} streams: {killed['broken']} broken, {killed['differ']} with "
        f"another token; they waited {killed['pause']['median_s']:.0f} s for an ordinary start of the next one."
    )


def links(found: Mapping[str, Any]) -> str:
    about, told = found["about"], found["summary"]
    rows = [
        [
            f"{row['rate'] / 1e6:g} MB/s, {'one worker' if row['ranks'] == 1 else str(row['ranks']) + ' ranks'}",
            f"{row['ttft_s']:.1f}",
            f"{row['predicted_s']:.1f}",
            f"{100 * row['error']:.0f}",
            ", ".join(f"{seconds:.1f}" for seconds in row["fetched_s"]),
            f"{row['ttft_s'] - max(row['fetched_s']):.1f}",
            ", ".join(f"{share:.3f}" for share in row["shares"]),
        ]
        for row in found["rows"]
    ]
    ratios = ", ".join(f"{ratio:.2f} at {float(rate) / 1e6:g} MB/s" for rate, ratio in told["ratio"].items())
    heads = [
        "link, start",
        "first token (s)",
        "predicted (s)",
        "off (%)",
        "each rank's fetch (s)",
        "the rest (s)",
    ]
    verdicts = [
        f"- First token of two ranks over one worker's: {ratios}; asked for at most {told['ratio_bar']}: "
        f"{_met(told['ratio_met'])}.",
        f"- Bytes that a rank fetched over the model's: {told['largest_share']:.3f} at most, asked for at most "
        f"{told['share_bar']}: {_met(told['share_met'])}.",
        f"- Predicted against actual: {100 * told['median_error']:.0f} % off (median), {100 * told['worst_error']:.0f} % at "
        f"worst; asked for a median of at most {100 * told['error_bar']:.0f} %: {_met(told['error_met'])}.",
    ]
    return "\n".join(
        [
            f"{about['model_bytes'] / 1e6:.0f} MB of weights, {about['layers']} layers, {about['cores']} cores; the machine's "
            f"load was {about['load_before']:.1f} before and {about['load_after']:.1f} after.",
            "",
            _table([*heads, "of the model's bytes"], rows),
            "",
            *verdicts,
        ]
    )


def scale_up(found: Mapping[str, Any]) -> str:
    about, told, rows = found["about"], found["summary"], found["rows"]
    whole = {
        way: max(row["whole_s"] for row in rows if row["way"] == way) for way in ("pipeline", "independent")
    }
    ratios = ", ".join(f"{ratio:.2f}x" for ratio in told["ratios"])
    return (
        f"- {len(rows[0]['ttft_s'])} requests at once for a cold model of {about['model_bytes'] / 1e6:.0f} MB, two servers "
        f"behind links of {about['rate_bytes_s'] / 1e6:g} MB/s: the mean first token after {told['pipeline']:.0f} s by a "
        f"pipeline, {told['independent']:.0f} s by two independent starts (medians); {ratios} sooner by pairs; asked for "
        f"at least {told['bar']}x: {_met(told['met'])}.\n"
        f"- Both servers were whole after {whole['pipeline']:.0f} s at most, the independent ones after "
        f"{whole['independent']:.0f} s."
    )


def _met(met: bool) -> str:
    return "met" if met else "**missed**"


def overhead(found: Mapping[str, Any]) -> str:
    cold = found["cold_request"]
    rows = [["a cold request beside its start", cold["overhead_median_s"], cold["bar_s"], cold["met"]]]
    rows += [
        [f"`{name}`", one["median_s"], one["bar_s"], one["met"]] for name, one in found["commands"].items()
    ]
    cells = [
        [name, f"{1000 * median:.0f}", f"{1000 * bar:.0f}", "yes" if met else "**no**"]
        for name, median, bar, met in rows
    ]
    return _table(["what", "median (ms)", "at most", "met"], cells)


def cold_ttft(found: Mapping[str, Any]) -> str:
    fit, ratio = found["fit"], found["vllm_over_four_workers"]
    lines = [
        f"C = {fit['runtime_s']:.2f} s, r = {fit['first_s']:.2f} s, b = {fit['bandwidth_gb_s']:.2f} GB/s, "
        f"t = {fit['rank_s']:.2f} s a rank.",
        "",
        _verdict("in sample, worst of 14", found["in_sample"]),
        _verdict("one model left out, worst", found["left_out"]),
        f"- Serverless vLLM over four workers, largest ratio: {ratio['modelled']:.2f} by the fits, {ratio['published']:.2f} by "
        f"the authors' figures, {ratio['claimed']} claimed.",
    ]
    return "\n".join(lines)


def _verdict(name: str, found: Mapping[str, float]) -> str:
    met = "met" if found["worst"] <= found["asked"] else "**missed**"
    return f"- {name}: {100 * found['worst']:.1f} %, asked for at most {100 * found['asked']:.0f} %: {met}."


def end_to_end(found: Mapping[str, Any]) -> str:
    systems = list(dict.fromkeys(row["system"] for row in found["rows"]))
    cells = list(dict.fromkeys((row["cv"], row["rps"]) for row in found["rows"]))
    at = {(row["cv"], row["rps"], row["system"]): row for row in found["rows"]}
    rows = [
        [
            f"{cv}, {rps}",
            *(f"{at[cv, rps, s]['ttft_attainment']} ({at[cv, rps, s]['published']})" for s in systems),
        ]
        for cv, rps in cells
    ]
    gain, off = found["pipeline_over_vllm"], found["mean_absolute_error_points"]
    reached = "reached" if gain["simulated_most"] >= gain["claimed"] else "**not reached**"
    return "\n".join(
        [
            _table(["CV, requests/s", *systems], rows),
            "",
            f"- The published order in {found['ordered_cells']} of {found['cells']} cells.",
            f"- Pipeline over serverless vLLM: {gain['simulated_least']:.2f} to {gain['simulated_most']:.2f}; "
            f"{gain['claimed']} claimed: {reached}.",
            "- Off the published figures by, on average: "
            + ", ".join(f"{n} {v:.1f} points" for n, v in off.items())
            + ".",
        ]
    )


def sensitivity(found: Mapping[str, Any]) -> str:
    varied = found["sensitivity"]
    systems = list(varied[0]["attainment"])
    rows = [
        [
            f"{one['skew']}, {one['runtime']}",
            *(str(one["attainment"][s]) for s in systems),
            "yes" if one["ordered"] else "no",
            f"{one['gain']:.2f}",
        ]
        for one in varied
    ]
    return _table(["skew, runtime", *systems, "published order", "pipeline over vLLM"], rows)


def cost(found: Mapping[str, Any]) -> str:
    rows = [
        [
            *(f"{row[name]:,}" for name in ("servers", "models", "requests", "groups")),
            f"{row['cpu_s']:.2f}",
            f"{row['ms_per_start']:.1f}",
        ]
        for row in found["rows"]
    ]
    exponents = ", ".join(f"{value:.2f}" for value in found["growth_exponents"])
    return "\n".join(
        [
            _table(["servers", "models", "requests", "starts", "CPU (s)", "ms a start"], rows),
            "",
            f"Exponent of the growth from row to row: {exponents}. The last row simulates "
            f"{found['simulated_seconds_per_cpu_second']:.1f} s in a second of CPU.",
        ]
    )
