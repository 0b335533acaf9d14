"""Figures and tables of the papers: what is compared, the paper's value, and ours.

`papers/fastserve-11` runs one and writes results/papers/fastserve-11.json, `papers/fastserve` all of that paper. The page of
the paper says what is measured and why the values differ. Those that need a GPU have a rehearsal: `papers/medusa-3 --rehearse`.
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
    """Run experiments of the paper `name`, all without numbers. A rehearsal stores no result.

    Raises SystemExit for an unknown number, and without a GPU where one is needed.
    """
    options = parser(None)
    options.set_defaults(rehearse=False, shapes=None)
    options.add_argument("numbers", nargs="*", metavar="NUMBER")
    if any(one.needs_gpu for one in experiments.values()):
        options.add_argument("--rehearse", action="store_true", help="run on the CPU; store nothing")
        options.add_argument("--shapes", help="models on the GPU, of benchmarks/llama.py, such as 1B,7b")
    given = options.parse_args(arguments)
    if unknown := [number for number in given.numbers if number not in experiments]:
        options.error(f"no experiment {unknown[0]}; there are {', '.join(experiments)}")
    for number in given.numbers or experiments:
        one, full = experiments[number], f"papers/{name}-{number}"
        command = ["python", "-m", "benchmarks", full, *(["--shapes", given.shapes] if given.shapes else [])]
        if one.needs_gpu and not given.rehearse and not nvml.list_gpus():
            raise SystemExit(
                f"error: {full} needs a GPU\nhint: rehearse it on the CPU: {' '.join(command)} --rehearse"
            )
        rows, details = one.measure(given.shapes, given.rehearse) if one.needs_gpu else one.measure()
        if not given.rehearse:
            finish(full, {"command": command, "kind": one.kind, "rows": rows, "details": details})
        prefix = "rehearsal, no measurement: " if given.rehearse else ""
        for what, paper, ours in rows:
            print(f"{prefix}{what}: paper {paper}, ours {ours}")
