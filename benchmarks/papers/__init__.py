"""Figures and tables of the papers: what is compared, the paper's value, and ours.

An experiment returns rows of (what, paper, ours). `python -m benchmarks papers/fastserve-11` runs one and writes
results/papers/fastserve-11.json; `python -m benchmarks papers/fastserve` runs all of that paper. `python -m benchmarks tables`
writes the rows into the page of the paper, which says what is measured and why the values differ. An experiment that needs a
GPU can be rehearsed: `papers/medusa-3 --rehearse`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common import finish, parser
from coldstart.system.devices import nvml

Rows = list[tuple[str, str, str]]
"""What is compared, the paper's value, and ours."""
Found = tuple[Rows, Mapping[str, Any]]
"""The rows, and details that are only stored."""


@dataclass(frozen=True)
class Experiment:
    """One figure or table of a paper. With `needs_gpu`, `measure` gets the option --shapes and whether it rehearses."""

    measure: Callable[..., Found]
    kind: str = "simulated"
    needs_gpu: bool = False


def declare(*measures: Callable[..., Found], kind: str = "simulated") -> dict[str, Experiment]:
    """Return experiments by number: `figure7` is "7", and `table2` is "table2"."""
    return {measure.__name__.removeprefix("figure"): Experiment(measure, kind) for measure in measures}


def run(name: str, experiments: Mapping[str, Experiment], arguments: Sequence[str]) -> None:
    """Run experiments of the paper `name`; without numbers, all that need no GPU, or rehearse all others.

    Raises SystemExit for an unknown number, and without a GPU where one is needed. A rehearsal stores no result.
    """
    options = parser(None)
    options.add_argument("numbers", nargs="*", metavar="NUMBER")
    options.add_argument("--rehearse", action="store_true", help="take the steps on the CPU; store nothing")
    options.add_argument("--shapes", help="models on the GPU, of benchmarks/llama.py, such as 1B,7b")
    given = options.parse_args(arguments)
    all_of_a_kind = (number for number, one in experiments.items() if one.needs_gpu == given.rehearse)
    wanted = given.numbers or list(all_of_a_kind)
    if unknown := [number for number in wanted if number not in experiments]:
        hint = f"hint: choose among {', '.join(experiments)}"
        raise SystemExit(f"error: {name} has no experiment {unknown[0]}\n{hint}")
    for number in wanted:
        one, full = experiments[number], f"papers/{name}-{number}"
        command = ["python", "-m", "benchmarks", full, *(["--shapes", given.shapes] if given.shapes else [])]
        if (given.rehearse or given.shapes) and not one.needs_gpu:
            raise SystemExit(
                f"error: --rehearse and --shapes have no effect on {full}\nhint: python -m benchmarks {full}"
            )
        if one.needs_gpu and not given.rehearse and nvml.read_free_bytes() is None:
            raise SystemExit(
                f"error: {full} needs a GPU\nhint: rehearse it on the CPU: {' '.join(command)} --rehearse"
            )
        rows, details = one.measure(given.shapes, given.rehearse) if one.needs_gpu else one.measure()
        if not given.rehearse:
            finish(full, {"command": command, "kind": one.kind, "rows": rows, "details": details})
        prefix = "rehearsal, no measurement: " if given.rehearse else ""
        for what, paper, ours in rows:
            print(f"{prefix}{what}: paper {paper}, ours {ours}")
