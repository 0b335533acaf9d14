"""Plan of placements on an empty fleet: every scheme that was considered, with its prediction."""

from __future__ import annotations

from math import inf
from typing import Any

from coldstart.errors import UsageError
from coldstart.fleet.roster import Roster
from coldstart.fleet.sizing import Scheme, considered
from coldstart.fleet.specification import FleetFile, FleetModel


def planned(file: FleetFile, names: tuple[str, ...] = (), required: int = 1) -> list[dict[str, Any]]:
    """Return a document for each named model, or for all. Raises UsageError for an unknown model."""
    known = {model.name: model for model in file.models}
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"unknown model {', '.join(unknown)}", hint=f"known models: {', '.join(known)}")
    return [_planned(file, known[name], required) for name in names or known]


def _planned(file: FleetFile, model: FleetModel, required: int) -> dict[str, Any]:
    roster, settings = Roster(file.settings), file.settings
    for server in file.servers:
        roster.join(server, 0.0)
    chosen = roster.place(model, required, 0.0, 0.0)
    weighed = considered(model, roster.offers(model, 0.0), settings, required=required)
    return {
        "model": model.name,
        "ttft_limit_s": None if model.ttft_s == inf else model.ttft_s,
        "tpot_limit_s": None if model.tpot_s == inf else model.tpot_s,
        "chosen": None if chosen is None else _scheme(chosen),
        "weighed": [_scheme(scheme) for scheme in weighed],
    }


def _scheme(scheme: Scheme) -> dict[str, Any]:
    places = [
        {"server": p.server, "fetch_bytes": p.size, "memory_bytes": p.memory, "full": p.full}
        for p in scheme.places
    ]
    predicted = {"ttft_s": scheme.ttft_s, "tpot_s": scheme.tpot_s, "meets_slo": scheme.meets}
    return {"ranks": len(places), "full": scheme.full, **predicted, "places": places}


def text(plans: list[dict[str, Any]]) -> str:
    """Format the plans as text."""
    return "\n".join(line for plan in plans for line in _lines(plan))


def _lines(plan: dict[str, Any]) -> list[str]:
    limits = [f"{name} {plan[key]:g} s" for name, key in LIMITS if plan[key] is not None]
    lines = [f"{plan['model']}: {', '.join(limits) or 'no limits'}"]
    chosen = plan["chosen"]
    if chosen is None:
        return [*lines, "  fits nowhere"]
    for scheme in plan["weighed"]:
        mark = ">" if (scheme["ranks"], scheme["full"]) == (chosen["ranks"], chosen["full"]) else " "
        verdict = "meets the limits" if scheme["meets_slo"] else "too slow"
        lines.append(
            f"{mark} {scheme['ranks']} ranks, {scheme['full']} whole: TTFT {scheme['ttft_s']:.2f} s, "
            f"TPOT {1000 * scheme['tpot_s']:.0f} ms, {verdict}"
        )
    for place_ in chosen["places"]:
        kind = "whole" if place_["full"] else "part"
        fetched, held = place_["fetch_bytes"] / 1e9, place_["memory_bytes"] / 1e9
        lines.append(f"    {place_['server']}: fetches {fetched:.2f} GB, holds {held:.2f} GB ({kind})")
    return lines


LIMITS = (("TTFT", "ttft_limit_s"), ("TPOT", "tpot_limit_s"))
