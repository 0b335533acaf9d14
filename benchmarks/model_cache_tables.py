"""The parts of MODEL_CACHE.md that publish.py fills in from the committed results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scheduling_tables import table

RESULTS = Path(__file__).parent / "results"
GROUPS = ("tuned", "held out", "all")


def parts() -> dict[str, str]:
    """By the mark's name."""
    cache, decision, paper = (
        _result(name)
        for name in ("model-cache-simulated", "model-cache-decision", "mcache-figures-simulated")
    )
    return {
        "policies": _policies(cache["cost_over_gdsf"]),
        "verdict": _verdict(cache),
        "host": _policies(cache["cost_over_gdsf_on_host"]),
        "families": _families(cache),
        "costs": _costs(_result("model-cache-costs")),
        "decision": _decision(decision),
        "table3": _table3(paper["figures"]["table3"]),
        "figures": _figures(paper["figures"]),
    }


def _result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def _policies(rows: Mapping[str, Mapping[str, float]]) -> str:
    head = ("policy", *GROUPS, "90th percentile", "worst")
    keys = (*GROUPS, "all, percentile 90", "all, worst")
    return "\n".join(
        table(head, [(name, *(f"{row[key]:.2f}" for key in keys)) for name, row in rows.items()])
    )


def _verdict(cache: Mapping[str, Any]) -> str:
    row, asked = cache["cost_over_gdsf"][cache["ours"]], cache["asked"]
    keys = {"geometric_mean": "all", "percentile_90": "all, percentile 90", "worst": "all, worst"}
    return "\n".join(
        f"- {name.replace('_', ' ')}: {row[key]:.3f}, asked for at most {asked[name]}: "
        + ("met." if row[key] <= asked[name] else "**not met**.")
        for name, key in keys.items()
    )


def _families(cache: Mapping[str, Any]) -> str:
    rows, names = cache["cost_over_gdsf"], ("lru", "lfu", "iam", cache["ours"], "offline plan", "bound")
    families = [(name, "tuned on") for name in cache["tuned_on"]]
    families += [(name, "held out") for name in cache["held_out"]]
    lines = [(family, kind, *(f"{rows[name][family]:.2f}" for name in names)) for family, kind in families]
    return "\n".join(table(("family", "", *names), lines))


def _costs(found: Mapping[str, Any]) -> str:
    head = ("sizes and penalties", "geometric mean", "90th percentile", "worst")
    rows = [(kind, *(f"{value:.2f}" for value in row.values())) for kind, row in found["costs"].items()]
    return "\n".join(table(head, rows))


def _decision(found: Mapping[str, Any]) -> str:
    head = ("policy", "decision, us (median)", "99th percentile", "a hit, us", "bytes a model")
    keys = ("decision_median_us", "decision_p99_us", "hit_median_us", "bytes_per_model")
    rows = [(name, *(row[key] for key in keys)) for name, row in found["policies"].items()]
    limits = found["limits"]
    return "\n".join(
        [
            *table(head, rows),
            "",
            f"Limits: {limits['decision_us']:.0f} us, {limits['bytes_per_model']} bytes.",
        ]
    )


def _table3(found: Mapping[str, Any]) -> str:
    head = ("cache", "policy", "paper, s", "ours, s", "paper, gain over LFU", "ours")
    rows = [
        (
            share,
            name,
            paper,
            found["ours"][share][name],
            f"{found['paper_gain'][share][name]} %",
            f"{gain[name]} %",
        )
        for share, gain in found["ours_gain"].items()
        for name, paper in found["paper"][share].items()
    ]
    return "\n".join(table(head, rows))


def _figures(found: Mapping[str, Any]) -> str:
    iam = {share: row["iam"] for share, row in found["10"]["ours"].items()}
    rows = [
        ("6", found["6"]["what"], found["6"]["paper"], _flat(found["6"]["ours"])),
        ("7", found["7"]["what"], _flat(found["7"]["paper"]), _flat(found["7"]["ours"])),
        ("8", found["8"]["what"], _flat(found["8"]["paper"]), _flat(found["8"]["ours"])),
        ("9", "hit ratio of IAM over the best other, random", *map(_flat, _ninth(found["9"]))),
        (
            "10",
            "throughput of IAM over LFU",
            _flat({k: v["iam"] for k, v in found["10"]["paper"].items()}),
            _flat(iam),
        ),
    ]
    return "\n".join(
        [*table(("figure", "what", "paper", "ours"), rows), "", f"Figure 10: {found['10']['note']}."]
    )


def _ninth(found: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    return found["paper_iam_over_others"], found["iam_over_best_other"]


def _flat(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key}: {_flat(value)}" if isinstance(value, Mapping) else f"{key} {value}"
        for key, value in values.items()
    )
