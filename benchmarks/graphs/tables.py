"""Table of the simulated CUDA graph results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.tables import Part, Table

Row = Mapping[str, Any]


def rows(result: Row) -> Iterator[Row]:
    """Yield what was measured, the result, the goal and the commit."""
    models, random, cost, altered = (result[name] for name in ("models", "random", "cost", "altered"))
    graphs, runs = models["models"], list(result["runs"].values())
    nodes = [row["bytes_per_node"] for row in graphs]
    captured = random["refused"] + random["ambiguous"]
    lines = (
        ("restored outputs bitwise equal", _of(graphs, "equal", "graphs"), "all", models),
        (f"the same, {len(runs)} runs at other addresses", _of(runs, "equal", "graphs"), "all", runs[-1]),
        ("bytes of a node in tables", f"{min(nodes)} to {max(nodes)}", "small", models),
        (
            "largest contents kept of a model, bytes",
            max(row["contents_bytes"] for row in graphs),
            "few",
            models,
        ),
        (f"random graphs judged, besides {captured} that are captured", random["judged"], "10000", random),
        ("constants corrupted among them", f"{random['corrupted']} of {random['constants']}", "0", random),
        ("pointers missed among them", f"{random['missed']} of {random['pointers']}", "0", random),
        ("altered bytes refused", f"{altered['refused']} of {altered['bytes']}", "all", altered),
        ("time in Python, µs a node", _spread(cost["restore_us_a_node_without_driver"]), "1.5", cost),
        ("relocation of 56,000 pointers, ms", _spread(cost["relocation_ms"]), "2", cost),
        ("tables read and verified, ms", _spread(cost["read_verified_ms"]), "20", cost),
    )
    for what, found, goal, job in lines:
        yield {"what": what, "found": found, "goal": goal, "commit": job.get("commit", result.get("commit"))}


def _of(graphs: list[Any], part: str, whole: str) -> str:
    return f"{sum(row[part] for row in graphs)} of {sum(row[whole] for row in graphs)}"


def _spread(samples: Row) -> str:
    return "{median:.2f} ({min:.2f} to {max:.2f}, {n} runs)".format_map(samples)


TABLE = Table(rows, {"what": "{what}", "result": "{found}", "goal": "{goal}", "commit": "{commit}"})
PARTS = [Part("benchmarks/RESULTS.md", "graphs", "graphs-simulated", (TABLE,))]
