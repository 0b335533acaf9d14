"""Figures of each paper beside ours, with the reason for the difference."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, load
from benchmarks.tables import Part, met

PAPERS = ("medusa", "mcache", "fastserve", "paraserve")


@dataclass(frozen=True)
class Figures(Part):
    """All experiments of the paper `result`: a table for each, its command and the reason for the difference."""

    def text(self, results: Path = RESULTS) -> str:
        return "\n".join(self._lines(results)).rstrip()

    def _lines(self, results: Path) -> Iterator[str]:
        for number, one in import_module(f"benchmarks.papers.{self.result}").EXPERIMENTS.items():
            title = f"Figure {number}" if number.isdigit() else number.capitalize().replace("Table", "Table ")
            command = f"`python -m benchmarks papers/{self.result}-{number}`"
            found = load(f"papers/{self.result}-{number}", results)
            if one.measure is None or found is None:
                state = f"Paper: {one.paper}. Needs a GPU: not measured" if one.paper else "Not measured yet"
                yield from (f"**{title}: {one.title}.** {state} ({command}).", "")
                continue
            yield f"**{title}: {one.title}** ({found['kind']}). {one.workload}; {one.sweep}. {command}"
            yield ""
            yield from ("| compared | paper | ours |", "|---|---|---|")
            yield from (f"| {what} | {paper} | {ours} |" for what, paper, ours in found["rows"])
            yield from ("", f"Why they differ: {one.differs}", "")


def fit_verdicts(result: Mapping[str, Any]) -> str:
    """Return the errors of ParaServe's equation 5, fitted to the published cold starts."""
    names = {"in_sample": "in sample, worst of 14", "left_out": "one model left out, worst"}
    return "\n".join(
        f"- {name}: {100 * result[key]['worst']:.1f} %; target {100 * result[key]['asked']:.0f} %: "
        f"{met(result[key]['worst'] <= result[key]['asked'])}."
        for key, name in names.items()
    )


FIT = (
    "C = {fit[runtime_s]:.2f} s, r = {fit[first_s]:.2f} s, b = {fit[bandwidth_gb_s]:.2f} GB/s, t = {fit[rank_s]:.2f} s"
    " per rank.",
    fit_verdicts,
    "- Serverless vLLM over four workers, largest ratio: {vllm_over_four_workers[modelled]:.2f} by the fits,"
    " {vllm_over_four_workers[published]:.2f} by the published times, {vllm_over_four_workers[claimed]} claimed.",
)
PARTS = [
    *(Figures(f"docs/explanation/{paper}.md", "figures", paper, (), f"papers/{paper}") for paper in PAPERS),
    Part("docs/reference/fleet-measurements.md", "cold-ttft", "fleet-cold-ttft", FIT, "fleet/cold_ttft"),
]
