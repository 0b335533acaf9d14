"""Every command of coldstart in a hint is accepted by the real command line.

The test reads each `hint`, literal or f-string, from the syntax tree and replaces values of the run time by WORD. It parses
the commands without running them.
"""

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import typer
from tools.command_line import parse

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"\bcoldstart (?=[a-z])(.*?)(?=$|[,;()`]|\. )")


@cache
def hints() -> list[tuple[str, str]]:
    """Return (place, text) of every hint."""
    paths = [p for package in ("artifacts", "coldstart", "commands") for p in (ROOT / package).rglob("*.py")]
    return [
        (f"{path.relative_to(ROOT)}:{value.lineno}", text)
        for path in sorted(paths)
        if re.search(rb"(?i)hint|Probe", path.read_bytes())
        for node in ast.walk(ast.parse(path.read_bytes()))
        for value in _values(node)
        for text in _texts(value)
    ]


def _values(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.Call):
        yield from (keyword.value for keyword in node.keywords if keyword.arg == "hint")
        if isinstance(node.func, ast.Name) and node.func.id == "Probe":
            yield from node.args[3:4]
    elif (
        isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id.lower() == "hint" for target in node.targets)
    ) or (isinstance(node, ast.AnnAssign) and ast.unparse(node.target).lower() == "hint" and node.value):
        yield node.value


def _texts(node: ast.expr) -> Iterator[str]:
    """Yield the texts of an expression: the branches of a condition, the words of a shlex.join."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "WORD" for part in node.values)  # type: ignore[misc]
    elif isinstance(node, ast.IfExp):
        yield from _texts(node.body)
        yield from _texts(node.orelse)
    elif isinstance(node, ast.BinOp):
        yield "".join(text for side in (node.left, node.right) for text in _texts(side))
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "shlex.join":
        words = node.args[0].elts if isinstance(node.args[0], ast.List) else []
        yield " ".join(
            str(w.value) if isinstance(w, ast.Constant) else "" if isinstance(w, ast.Starred) else "WORD"
            for w in words
        )


def test_command_in_a_hint_parses() -> None:
    for place, text in hints():
        for found in COMMAND.finditer(text):
            words = shlex.split(found[1])
            try:
                parse(words)
            except typer.Exit:
                assert "--help" in words, place
            except typer.BadParameter as error:
                # An f-string fills in one of the choices at run time.
                assert "'WORD' is not one of" in error.message, place
