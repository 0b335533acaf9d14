"""Tables of the eviction policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from benchmarks.host import live_tables
from benchmarks.tables import Part, Table, listed, met

PAGE = "benchmarks/MODEL_CACHE.md"
GROUPS = ("tuned", "held out", "all", "all, percentile 90", "all, worst")
FAMILY_POLICIES = ("lru", "lfu", "iam", "predictive", "offline plan", "bound")
Row = Mapping[str, Any]


def items(path: str, result: Row) -> Iterator[Row]:
    """Yield the members of a mapping with their names."""
    for name, row in result[path].items():
        yield {"name": name, **row}


def verdicts(result: Row) -> str:
    """Return our policy against its targets."""
    row = result["cost_over_gdsf"][result["ours"]]
    keys = {"geometric_mean": "all", "percentile_90": "all, percentile 90", "worst": "all, worst"}
    return "\n".join(
        f"- {name.replace('_', ' ')}: {row[key]:.3f}, target at most {result['asked'][name]}: "
        f"{met(row[key] <= result['asked'][name])}."
        for name, key in keys.items()
    )


def families(result: Row) -> Iterator[Row]:
    """Yield the cost of some policies for each family of traces."""
    for kind, names in (("tuned on", result["tuned_on"]), ("held out", result["held_out"])):
        for family in names:
            costs = {policy: result["cost_over_gdsf"][policy][family] for policy in FAMILY_POLICIES}
            yield {"name": family, "kind": kind, **costs}


def table3(result: Row) -> Iterator[Row]:
    """Yield the rows of Table 3 of the mCache paper."""
    found = result["figures"]["table3"]
    for share, gain in found["ours_gain"].items():
        for policy, paper in found["paper"][share].items():
            ours = {"ours": found["ours"][share][policy], "gain": gain[policy]}
            yield {
                "share": share,
                "policy": policy,
                "paper": paper,
                "paper_gain": found["paper_gain"][share][policy],
                **ours,
            }


def figures(result: Row) -> Iterator[Row]:
    """Yield the figures of the mCache paper."""
    found = result["figures"]
    for number in ("6", "7", "8"):
        yield {
            "figure": number,
            "what": found[number]["what"],
            **_both(found[number]["paper"], found[number]["ours"]),
        }
    ninth = _both(found["9"]["paper_iam_over_others"], found["9"]["iam_over_best_other"])
    yield {"figure": "9", "what": "hit ratio of IAM over the best other, random", **ninth}
    iam = [{share: row["iam"] for share, row in found["10"][whose].items()} for whose in ("paper", "ours")]
    yield {"figure": "10", "what": "throughput of IAM over LFU", **_both(*iam)}


def _both(paper: Any, ours: Any) -> Row:
    return {"paper": _flat(paper), "ours": _flat(ours)}


def _flat(values: Any) -> str:
    if not isinstance(values, Mapping):
        return str(values)
    return listed(f"{k}: {_flat(v)}" if isinstance(v, Mapping) else f"{k} {v}" for k, v in values.items())


def policies(path: str) -> Table:
    """Return a table of the cost of each policy over that of GDSF."""
    columns = {group: f"{{{group}:.2f}}" for group in GROUPS}
    return Table(partial(items, path), {"policy": "{name}", **columns})


COSTS = {
    "sizes and penalties": "{name}",
    "geometric mean": "{geometric_mean:.2f}",
    "90th percentile": "{percentile_90:.2f}",
    "worst": "{worst:.2f}",
}
TABLE3 = {
    "cache": "{share}",
    "policy": "{policy}",
    "paper (s)": "{paper}",
    "ours (s)": "{ours}",
    "paper, gain over LFU": "{paper_gain} %",
    "ours, gain over LFU": "{gain} %",
}
CACHE, MCACHE = "model-cache-simulated", "mcache-figures-simulated"
PARTS = [
    *live_tables.PARTS,
    Part(PAGE, "policies", CACHE, (policies("cost_over_gdsf"),), "host/policies"),
    Part(PAGE, "verdict", CACHE, (verdicts,), "host/policies"),
    Part(PAGE, "host", CACHE, (policies("cost_over_gdsf_on_host"),), "host/policies"),
    Part(
        PAGE,
        "families",
        CACHE,
        (
            Table(
                families,
                {"family": "{name}", "set": "{kind}", **{p: f"{{{p}:.2f}}" for p in FAMILY_POLICIES}},
            ),
        ),
        "host/policies",
    ),
    Part(PAGE, "costs", "model-cache-costs", (Table(partial(items, "costs"), COSTS),)),
    Part(PAGE, "table3", MCACHE, (Table(table3, TABLE3),), "host/mcache_figures"),
    Part(
        PAGE,
        "figures",
        MCACHE,
        (
            Table(figures, {"figure": "{figure}", "what": "{what}", "paper": "{paper}", "ours": "{ours}"}),
            lambda result: f"Figure 10: {result['figures']['10']['note']}.",
        ),
        "host/mcache_figures",
    ),
]
