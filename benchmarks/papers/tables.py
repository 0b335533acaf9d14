"""Figures of each paper beside ours, with the reason for the difference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from benchmarks.common import RESULTS, load
from benchmarks.tables import Part

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
            if found is None:
                state = (
                    f"Paper: {one.paper}. Needs a GPU: not measured" if one.needs_gpu else "Not measured yet"
                )
                yield from (f"**{title}: {one.title}.** {state} ({command}).", "")
                continue
            yield f"**{title}: {one.title}** ({found['kind']}). {one.workload}; {one.sweep}. {command}"
            yield ""
            yield from ("| compared | paper | ours |", "|---|---|---|")
            yield from (f"| {what} | {paper} | {ours} |" for what, paper, ours in found["rows"])
            yield from ("", f"Why they differ: {one.differs}", "")


PARTS = [Figures(f"docs/explanation/{paper}.md", "figures", paper, (), f"papers/{paper}") for paper in PAPERS]
