"""Writing the committed results into README.md and RESULTS.md, so that no figure is typed by hand.

python benchmarks/publish.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import weights_report  # noqa: E402

from coldstart.report import markdown  # noqa: E402

README = HERE.parent / "README.md"
RESULTS = HERE / "RESULTS.md"


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
    """RESULTS.md with the committed reports."""
    text = marked(text, "cold-start", cold_start()[1])
    for name in weights_report.TABLES:
        if (result := HERE / "results" / f"{name}.json").exists():
            text = marked(text, name, weights_report.published(name, json.loads(result.read_text())))
    return text


def cold_start() -> tuple[str, str]:
    """(the table alone, the whole report) of the committed cold-start result."""
    report = markdown.render(json.loads((HERE / "results" / "cold-start-cpu.json").read_text()))
    table = "\n".join(line for line in report.splitlines() if line.startswith("|"))
    return table, report.strip()


def main() -> None:
    """Write both files."""
    README.write_text(readme(README.read_text()))
    RESULTS.write_text(results(RESULTS.read_text()))


if __name__ == "__main__":
    main()
