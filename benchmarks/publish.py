"""Writing the committed results into README.md and RESULTS.md, so that no figure is typed by hand.

python benchmarks/publish.py
"""

from __future__ import annotations

import json
from pathlib import Path

from coldstart.report import markdown

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
RESULTS = HERE / "RESULTS.md"
BEGIN, END = "<!-- cold-start -->", "<!-- /cold-start -->"


def readme(text: str, table: str) -> str:
    """`text` with the marked part replaced by `table`. Raises ValueError where there are no marks."""
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def cold_start() -> tuple[str, str]:
    """(the table alone, the whole report) of the committed cold-start result."""
    report = markdown.render(json.loads((HERE / "results" / "cold-start-cpu.json").read_text()))
    table = "\n".join(line for line in report.splitlines() if line.startswith("|"))
    return table, report


def main() -> None:
    """Write both files."""
    table, report = cold_start()
    README.write_text(readme(README.read_text(), table))
    RESULTS.write_text(readme(RESULTS.read_text(), report.strip()))


if __name__ == "__main__":
    main()
