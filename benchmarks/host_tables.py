"""The host's results as Markdown, for docs/host.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
# What was wanted: tokens a second through the gateway, and seconds of starts beside GDSF's and LRU's.
THROUGHPUT, OVER_GDSF, OVER_LRU = 0.97, 0.9, 0.6
MIB = 1 << 20


def parts() -> dict[str, str]:
    found = json.loads((RESULTS / "host-live-cpu.json").read_text())
    rows = [
        ("part", "found"),
        ("---", "---"),
        *(
            row
            for part in (cold, faults, streams, overhead, cycles, tournament)
            for row in part(found[part.__name__])
        ),
    ]
    return {"host": "\n".join(f"| {' | '.join(row)} |" for row in rows), "host-load": load(found)}


Rows = list[tuple[str, str]]


def load(found: Mapping[str, Any]) -> str:
    """The machine's load before each part, largest first: seconds under load are upper bounds."""
    loads = sorted(((part["about"]["load_before"], name) for name, part in found.items()), reverse=True)
    return ", ".join(f"{before:.1f} in `{name}`" for before, name in loads)


def cold(found: Mapping[str, Any]) -> Rows:
    start = found["start"]
    return [
        (
            f"`cold`: {found['requests']} requests to a model that does not run",
            f"starts: {found['starts']} ({start['seconds']:.1f} s from the order to ready, `{start['mode']}`), "
            f"{found['answered']} answered, {found['seen_by_server']} seen by vLLM, "
            f"{found['out_of_order_at_server']} out of order in its own log",
        )
    ]


def faults(found: Mapping[str, Any]) -> Rows:
    killed, failing, reload = (found[name] for name in ("server_killed", "always_fails", "reload_under_load"))
    done = "with" if killed["said_done"] else "without"
    codes = ", ".join(map(str, failing["statuses"]))
    return [
        (
            "`faults`: a server killed in mid-stream",
            f"the stream ends with an error of code {killed['error_event']['code']} and {done} `[DONE]`; request "
            f"{killed['asked_until_it_served_again']} after it is served by a new server; {_whole(killed)}",
        ),
        (
            "`faults`: a model that always fails, asked again and again",
            f"{codes} each time with its own reason, {failing['starts_tried']} starts tried; {_whole(failing)}",
        ),
        (
            f"`faults`: {reload['reloads']} reloads under load",
            f"{_whole(reload)}, starts meanwhile: {reload['starts_meanwhile']}",
        ),
    ]


def _whole(found: Mapping[str, Any]) -> str:
    beside = found["bystanders"]
    return f"{beside['whole']} of {beside['streams']} streams of another model whole"


def streams(found: Mapping[str, Any]) -> Rows:
    before, after = found["after_500_streams"], found["after_all"]
    return [
        (
            f"`streams`: {found['streams']:,} streams over servers without a model, {found['left']:,} of whose clients go "
            "in the middle",
            f"{found['mixed']} got another's pieces; afterwards {after['descriptors']} descriptors and {after['tasks']} "
            f"tasks are open, after the first 500 it was {before['descriptors']} and {before['tasks']}; the process has "
            f"{after['bytes'] / MIB:.0f} MiB then and had {before['bytes'] / MIB:.0f}",
        )
    ]


def overhead(found: Mapping[str, Any]) -> Rows:
    later = found["ttft_s"]["over_direct"]
    runs = found["throughput"]
    ratios = ", ".join(
        f"{clients} clients: {one['ratio']['p50']:.2f}x (quartiles {one['ratio']['p25']:.2f} and {one['ratio']['p75']:.2f})"
        for clients, one in runs.items()
    )
    held = all(one["ratio"]["p50"] >= THROUGHPUT for one in runs.values())
    verdict = (
        f"The {THROUGHPUT} that was wanted holds" if held else f"**Below the {THROUGHPUT} that was wanted**"
    )
    cost = " and ".join(f"{one['gateway_cpu_s_per_token'] * 1e6:.0f}" for one in runs.values())
    pairs = min(one["ratio"]["n"] for one in runs.values())
    return [
        (
            f"`overhead`: the first token of a warm model, through the gateway and past it in turn ({later['n']} each)",
            f"{later['p50'] * 1e3:.1f} ms later at the median (quartiles of the pairs {later['p25'] * 1e3:.1f} and "
            f"{later['p75'] * 1e3:.1f} ms)",
        ),
        (
            "`overhead`: output tokens a second beside the same server without the gateway, both on the same "
            f"{found['about']['cores']} cores ({pairs} pairs each)",
            f"{ratios}. {verdict}: client, gateway and server share the cores, and the gateway takes {cost} microseconds "
            "of them for a token",
        ),
    ]


def cycles(found: Mapping[str, Any]) -> Rows:
    first, last = found["after_the_first"], found["after_the_last"]
    kept = ", ".join(
        f"{name.replace('_', ' ')} {first[name]} and {last[name]}" for name in first if name != "host_bytes"
    )
    return [
        (
            f"`cycles`: {found['cycles']} times {found['models']} models asked at once, from nothing to serving and back "
            f"(idle time 0; {found['starts']:,} starts, {' and '.join(found['modes'])}, {found['start_s']['p50']:.2f} s at "
            f"the median; {found['cycle_s']['p50']:.1f} s a cycle)",
            f"{found['failed_starts']} failed; after the first cycle and the last: {kept}; the host's own memory "
            f"{first['host_bytes'] / MIB:.0f} and {last['host_bytes'] / MIB:.0f} MiB; directories left: "
            f"{len(found['directories_left'])}",
        )
    ]


def tournament(found: Mapping[str, Any]) -> Rows:
    live = found["totals"]["live"]
    asked = [run["requests"] for run in found["runs"]]
    quotients = [run["simulated_over_live"] for run in found["runs"]]
    beside = f"{live['over_gdsf']:.2f}x of GDSF and {live['over_lru']:.2f}x of LRU"
    held = live["over_gdsf"] <= OVER_GDSF and live["over_lru"] <= OVER_LRU
    verdict = beside if held else f"**{beside}, where {OVER_GDSF} and {OVER_LRU} were wanted**"
    traces = len({run["trace"] for run in found["runs"]})
    return [
        (
            f"`tournament`: {len(found['models'])} models in {found['memory_share']:.0%} of their memory, {traces} traces of "
            f"{found['trace_s']:.0f} s ({min(asked)} to {max(asked)} requests), live, seconds of starts in all",
            f"predictive {live['predictive']:.1f}, GDSF {live['gdsf']:.1f}, LRU {live['lru']:.1f}: {verdict}. The simulator "
            "on the same traces, with the live starts' own seconds: "
            f"{min(quotients):.2f} to {max(quotients):.2f} of the live sum in each of the {len(quotients)} runs",
        )
    ]
