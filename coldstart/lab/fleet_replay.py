"""Replay of a trace on the simulated fleet, for `trace-replay --fleet` and `fleet simulate`.

Model: prefill and decode times are those of the model, or of one profile of iteration times with a batch of one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from math import inf
from pathlib import Path
from random import Random
from typing import Any

from coldstart.fleet.configuration import FleetFile, load
from coldstart.lab.fleet import FleetOutcome, FleetRequest, FleetServed, simulate
from coldstart.lab.plan import TracePlan, gamma_gaps, map_models
from coldstart.lab.records import describe
from coldstart.lab.traces import TraceReport, TraceRequest
from coldstart.scheduling import IterationProfile


def replay_on_fleet(
    plan: TracePlan, fleet: Path, profile: IterationProfile | None, report: TraceReport
) -> dict[str, Any]:
    """Replay a trace on the simulated fleet of the file `fleet`; return the result document, times in seconds.

    The plan's rows get the fleet's models if the plan names none.
    """
    file = load(fleet)
    names = [model.name for model in file.models]
    rows = plan.over(names, fleet).rows(report)
    return run(file, rows, profile)


def generated(
    file: FleetFile, rate: float, cv: float, duration_s: float, tokens: int, seed: int
) -> Iterable[TraceRequest]:
    """Return requests with gamma arrivals over the fleet's models by Zipf's law, each with `tokens` output tokens."""
    names = [model.name for model in file.models]
    return map_models(_arrivals(rate, cv, duration_s, tokens, seed), names, "zipf", seed)


def _arrivals(rate: float, cv: float, duration_s: float, tokens: int, seed: int) -> Iterator[TraceRequest]:
    now = 0.0
    for gap in gamma_gaps(rate, cv, Random(seed)):
        now += gap
        if now > duration_s:
            return
        yield TraceRequest(now, 1, tokens)


def run(
    file: FleetFile, rows: Iterable[TraceRequest], profile: IterationProfile | None = None
) -> dict[str, Any]:
    return document(simulate(_requests(file, rows, profile), file.servers, file.models, file.settings), file)


def _requests(
    file: FleetFile, rows: Iterable[TraceRequest], profile: IterationProfile | None
) -> Iterator[FleetRequest]:
    costs = {model.name: model.costs for model in file.models}
    for row in rows:
        own = costs[str(row.model)]
        prefill = own.prefill_s if profile is None else profile.prefill(row.prompt_tokens)
        decode = own.decode_s if profile is None else profile.decode(1)
        yield FleetRequest(row.arrival_s, str(row.model), prefill, decode, row.output_tokens)


def document(outcome: FleetOutcome, file: FleetFile) -> dict[str, Any]:
    """Return the result document of a replay.

    It contains SLO attainment, TTFT and TPOT by percentile, cold share, groups by size, rejections by status, and the
    same for each model.
    """
    by_model: dict[str, list[FleetServed]] = {model.name: [] for model in file.models}
    for one in outcome.requests:
        by_model[one.request.model].append(one)
    return {
        "kind": "simulated fleet",
        "placement": file.settings.placement,
        "servers": len(file.servers),
        "requests": len(outcome.requests),
        "refused": dict(Counter(str(one.status) for one in outcome.requests if one.status != 200)),
        **_figures(outcome.requests, file),
        "starts": outcome.starts,
        "workers": outcome.workers,
        "groups_by_ranks": {str(ranks): count for ranks, count in sorted(outcome.ranks.items())},
        "streams_moved": outcome.moves,
        "fetched_bytes": outcome.fetched,
        "device_byte_s": outcome.held_byte_s,
        "duration_s": outcome.end_s,
        "models": {
            name: {"requests": len(served), **_figures(served, file)}
            for name, served in by_model.items()
            if served
        },
    }


def _figures(served: list[FleetServed], file: FleetFile) -> dict[str, Any]:
    limits = {model.name: (model.ttft_s, model.tpot_s) for model in file.models}
    done = [one for one in served if one.status == 200 and one.first_s < inf]
    kept = [one.ttft_s <= limits[one.request.model][0] for one in done]
    paced = [one.tpot_s <= limits[one.request.model][1] for one in done]
    return {
        "ttft_attainment": sum(kept) / max(1, len(served)),
        "tpot_attainment": sum(paced) / max(1, len(served)),
        "cold_share": sum(one.cold for one in served) / max(1, len(served)),
        "ttft_s": describe([one.ttft_s for one in done]) or {},
        "tpot_s": describe([one.tpot_s for one in done]) or {},
    }


def format_text(found: dict[str, Any]) -> str:
    """Format the result document as text."""
    groups = ", ".join(f"{count} of {ranks}" for ranks, count in found["groups_by_ranks"].items())
    lines = [
        f"simulated fleet of {found['servers']} servers, placement {found['placement']}: {found['requests']} requests, "
        f"{100 * found['cold_share']:.1f} % waited for a start, refused {sum(found['refused'].values())}",
        f"started {found['starts']} groups (by ranks: {groups or 'none'}), streams moved {found['streams_moved']}, "
        f"fetched {found['fetched_bytes'] / 1e9:.1f} GB",
        f"{'model':<28}{'requests':>9}{'TTFT in SLO':>13}{'TTFT mean':>11}{'p90':>9}{'p99':>9}{'TPOT in SLO':>13}",
    ]
    for name, row in [("all", found), *found["models"].items()]:
        ttft = [f"{row['ttft_s'].get(key, 0.0):.2f}" for key in ("mean", "p90", "p99")]
        shares = [f"{100 * row[key]:.1f} %" for key in ("ttft_attainment", "tpot_attainment")]
        lines.append(
            f"{name:<28}{row['requests']:>9}{shares[0]:>13}{ttft[0]:>11}{ttft[1]:>9}{ttft[2]:>9}{shares[1]:>13}"
        )
    return "\n".join(lines)
