"""Writing the committed results into README.md, RESULTS.md and SCHEDULING.md, so that no figure is typed by hand.

python benchmarks/publish.py
"""

from __future__ import annotations

import json
from pathlib import Path

import scheduling_tables

from coldstart.report import markdown

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
RESULTS = HERE / "RESULTS.md"
SCHEDULING = HERE / "SCHEDULING.md"


def marked(text: str, name: str, content: str) -> str:
    """`text` with the part marked `name` replaced by `content`. Raises ValueError where there are no marks."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"no {begin} ... {end}")
    return f"{before}{begin}\n{content}\n{end}{after}"


def readme(text: str) -> str:
    """README with the committed table and transcript."""
    text = marked(text, "cold-start", cold_start()[0])
    transcript = json.loads((HERE / "results" / "transcript.json").read_text())
    for name in ("materialize", "inspect", "validate", "serve", "template"):
        entry = transcript[name]
        text = marked(text, name, f"```\n$ {entry['command']}\n{entry['printed'].rstrip()}\n```")
    return text


def results(text: str) -> str:
    """RESULTS.md with the committed report."""
    return marked(text, "cold-start", cold_start()[1])


def scheduling(text: str) -> str:
    """SCHEDULING.md with the committed live results and the calibration."""
    for name, content in scheduling_tables.parts().items():
        text = marked(text, name, content)
    return text


def cold_start() -> tuple[str, str]:
    """(the table alone, the whole report) of the committed cold-start result."""
    report = markdown.render(json.loads((HERE / "results" / "cold-start-cpu.json").read_text()))
    table = "\n".join(line for line in report.splitlines() if line.startswith("|"))
    return table, report.strip()


def main() -> None:
    """Write the files."""
    README.write_text(readme(README.read_text()))
    RESULTS.write_text(results(RESULTS.read_text()))
    SCHEDULING.write_text(scheduling(SCHEDULING.read_text()))


if __name__ == "__main__":
    main()
