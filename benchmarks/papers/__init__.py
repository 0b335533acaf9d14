"""Experiments of the papers, each declared once: workload, sweep, what is compared, and the paper's value.

An experiment returns rows of (what, paper, ours). `python -m benchmarks papers/fastserve-11` runs one and writes
results/papers/fastserve-11.json; `python -m benchmarks papers/fastserve` runs all of that paper. `python -m benchmarks tables`
writes the rows into the page of the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.common import finish

Rows = list[tuple[str, str, str]]
"""What is compared, the paper's value, and ours."""


@dataclass(frozen=True)
class Experiment:
    """One figure or table of a paper.

    `measure` returns the rows, and details that are only stored. `differs` is the reason for the difference. Without
    `measure` the experiment needs a GPU.
    """

    title: str
    workload: str
    sweep: str
    differs: str
    kind: str = "simulated"
    measure: Callable[[], tuple[Rows, Mapping[str, Any]]] | None = None
    paper: str = ""


def run(name: str, experiments: Mapping[str, Experiment], numbers: Iterable[str]) -> None:
    """Run experiments of the paper `name`, all without `numbers`. Raises SystemExit for an unknown number."""
    wanted = list(numbers) or [number for number, one in experiments.items() if one.measure]
    if unknown := [number for number in wanted if number not in experiments]:
        hint = f"hint: choose among {', '.join(experiments)}"
        raise SystemExit(f"error: {name} has no experiment {unknown[0]}\n{hint}")
    for number in wanted:
        one = experiments[number]
        if one.measure is None:
            print(f"{name}-{number}: {one.title}: needs a GPU. Paper: {one.paper}")
            continue
        rows, details = one.measure()
        declared = {"title": one.title, "kind": one.kind, "workload": one.workload, "sweep": one.sweep}
        command = ["python", "-m", "benchmarks", f"papers/{name}-{number}"]
        result = {"command": command, **declared, "rows": rows, "details": details}
        finish(f"papers/{name}-{number}", result)
        for what, paper, ours in rows:
            print(f"{what}: paper {paper}, ours {ours}")
