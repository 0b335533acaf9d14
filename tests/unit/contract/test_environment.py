"""Every variable is read through the table, and docs/environment.md equals the table."""

from __future__ import annotations

import ast
import copy
import json
import pickle
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from coldstart.contract import environment
from coldstart.contract.environment import EVERY, Variable

ROOT = Path(__file__).parents[3]
HOME = Path("coldstart/contract/environment.py")
OURS = re.compile(r"COLDSTART_[A-Z0-9_]*")
READS = ("get", "pop", "setdefault")


@cache
def modules() -> list[tuple[Path, ast.AST]]:
    """Return the modules that can contain a variable's name or read one."""
    packages = [ROOT / package for package in ("artifacts", "coldstart", "commands")]
    paths = [path for package in packages for path in sorted(package.rglob("*.py")) if path != ROOT / HOME]
    texts = {path.relative_to(ROOT): path.read_bytes() for path in paths}
    words = (b"COLDSTART_", b"environ", b"getenv")
    return [(path, ast.parse(text)) for path, text in texts.items() if any(word in text for word in words)]


def literal_names(tree: ast.AST) -> Iterator[str]:
    """Yield literal names of our variables, also the beginning of an f-string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and OURS.fullmatch(node.value):
            yield node.value


def literal_reads(tree: ast.AST) -> Iterator[str]:
    """Yield literal names that are looked up in os.environ."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READS:
            holder, keys = node.func.value, node.args[:1]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "os.getenv":
            holder, keys = ast.parse("os.environ", mode="eval").body, node.args[:1]
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            holder, keys = node.value, [node.slice]
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            holder, keys = node.comparators[0], [node.left]
        else:
            continue
        if ast.unparse(holder) == "os.environ":
            yield from (str(key.value) for key in keys if isinstance(key, ast.Constant))


def test_the_document_is_the_table() -> None:
    table = runpy.run_path(str(ROOT / "docs/_tools/environment.py"))["table"]()
    assert (ROOT / "docs/reference/environment.md").read_text() == table, "python docs/_tools/environment.py"


def test_no_other_module_contains_a_variable_name() -> None:
    found = {(path.parts[0], name) for path, tree in modules() for name in literal_names(tree)}
    assert {pair for pair in found if pair[0] != "artifacts"} == set()
    # artifacts cannot import this table, so its literal names must be in the table.
    assert {name for _, name in found} <= set(EVERY)


def test_no_variable_is_read_by_a_literal_name() -> None:
    found = {(str(path), name) for path, tree in modules() for name in literal_reads(tree)}
    assert found == set()


@pytest.mark.parametrize("variable", EVERY)
def test_read_returns_the_default_when_unset(variable: Variable[object]) -> None:
    assert variable.about.endswith(".")
    assert variable.read({}) == variable.read({variable: ""}) == variable.default


def test_every_variable_stands_in_the_table_once() -> None:
    assert len(set(EVERY)) == len(EVERY)
    assert all(variable.startswith("COLDSTART_") == (variable.audience != "foreign") for variable in EVERY)


@pytest.mark.parametrize("text", ["none", "0", "-1", "inf", "nan", "1e999"])
def test_a_number_out_of_bounds_is_named(text: str) -> None:
    with pytest.raises(
        ValueError, match=f"invalid COLDSTART_PREFETCH_STREAMS: '{text}', expected a number of at least 1"
    ):
        environment.PREFETCH_STREAMS.read({"COLDSTART_PREFETCH_STREAMS": text})


def test_values_are_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.PREFETCH_IDLE_S, "1.5")
    monkeypatch.setenv(environment.DEBUG, "yes")
    assert environment.PREFETCH_IDLE_S.read() == 1.5 and environment.DEBUG.read() is False
    assert environment.DEBUG.read({"COLDSTART_DEBUG": "1"}) is True


def test_copied_and_serialized_variable_is_a_plain_string() -> None:
    variable = environment.PLAN
    assert variable == "COLDSTART_PLAN" and hash(variable) == hash("COLDSTART_PLAN")
    for other in (copy.deepcopy(variable), pickle.loads(pickle.dumps(variable))):
        assert type(other) is str and other == variable
    assert json.dumps({variable: 1}) == '{"COLDSTART_PLAN": 1}'
    shown = subprocess.run(
        [sys.executable, "-c", "import os; print(os.environ['COLDSTART_PLAN'])"],
        env={variable: "x"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == "x\n"
