"""Run one benchmark by name, or list all of them.

    python -m benchmarks                      list the benchmarks.
    python -m benchmarks NAME [ARGS]          run start/cold_start, cold_start or cold-start.
    python -m benchmarks papers/PAPER-NUMBER  run one figure or table of a paper, such as papers/fastserve-11.
    python -m benchmarks tables               write the committed results into the pages.

A benchmark is a module of a claim folder whose docstring has a line "Run:". Listing reads docstrings only.
"""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).parent
FOLDERS = ("papers", "start", "gpu", "scheduling", "host", "fleet")


def find_benchmarks() -> dict[str, str]:
    """Return the docstring of each benchmark by its name, such as "start/cold_start"."""
    paths = (path for folder in FOLDERS for path in sorted((HERE / folder).glob("*.py")))
    found = {str(path.relative_to(HERE).with_suffix("")): _docstring(path) for path in paths}
    return {name: text for name, text in found.items() if "\nRun: " in text}


def resolve(name: str) -> str:
    """Return the full name of the benchmark that `name` abbreviates. Raises SystemExit without exactly one match."""
    wanted = name.removesuffix(".py").replace("-", "_")
    matches = [full for full in find_benchmarks() if wanted in (full, full.partition("/")[2])]
    if len(matches) == 1:
        return matches[0]
    reason = f"ambiguous: {', '.join(matches)}" if matches else "no such benchmark"
    raise SystemExit(f"error: cannot run {name}: {reason}\nhint: python -m benchmarks")


def main(arguments: list[str]) -> None:
    """Run the benchmark that the first argument names with the other arguments."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("\n".join(f"{name:<27} {text.splitlines()[0]}" for name, text in find_benchmarks().items()))
        return
    if arguments[0].startswith("papers/"):
        paper, _, number = arguments[0].partition("-")
        arguments = [paper, *filter(None, [number]), *arguments[1:]]
    name = "tables" if arguments[0] == "tables" else resolve(arguments[0])
    if {"-h", "--help"} & set(arguments[1:]):
        print(_docstring(HERE / f"{name}.py"))
        return
    sys.argv = [name, *arguments[1:]]
    runpy.run_module(f"benchmarks.{name.replace('/', '.')}", run_name="__main__", alter_sys=True)


def _docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


if __name__ == "__main__":
    main(sys.argv[1:])
