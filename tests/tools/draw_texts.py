"""Draw texts of the code at random for a review of its language: docstrings, help texts, errors with hints, and names.

Run: python tests/tools/draw_texts.py SEED
"""

from __future__ import annotations

import ast
import random
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SIZES = {"docstring": 60, "help": 40, "error": 40, "name": 80}
Text = tuple[str, str, str]
"""Kind, place, text."""


def read(path: Path) -> Iterator[Text]:
    """Yield the texts of one module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = getattr(node, "name", path.stem)
            if name.startswith("_"):
                continue
            if text := ast.get_docstring(node):
                yield "docstring", f"{place} {name}", " ".join(text.split())
            yield "name", place, name
        elif isinstance(node, ast.keyword) and node.arg in ("help", "hint"):
            yield "help" if node.arg == "help" else "error", place, ast.unparse(node.value)
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            yield "error", place, ast.unparse(node.exc)


def main() -> None:
    """Print the draw."""
    chosen = random.Random(int(sys.argv[1]))
    paths = [
        path
        for name in ("coldstart", "commands", "artifacts")
        for path in sorted((ROOT / name).rglob("*.py"))
    ]
    texts = sorted(text for path in paths for text in read(path))
    for kind, size in SIZES.items():
        found = [text for text in texts if text[0] == kind]
        print(f"## {size} of {len(found)}: {kind}")
        for _, place, text in chosen.sample(found, size):
            print(f"{place}\n    {text}")


if __name__ == "__main__":
    main()
