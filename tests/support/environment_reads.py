"""Find environment variables that Python sources read, by every literal name in their syntax trees."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

_MENTIONS = re.compile(rb"environ|getenv|env_var|envs?\b")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{1,80}")
_READERS = frozenset(
    {
        "getenv",
        "get",
        "pop",
        "setdefault",
        "env_with_choices",
        "env_list_with_choices",
        "env_set_with_choices",
    }
)


def names(directory: Path) -> dict[str, str]:
    """Return {variable: file that reads it} of every .py file below `directory`."""
    found: dict[str, str] = {}
    for path in [directory] if directory.is_file() else sorted(directory.rglob("*.py")):
        source = path.read_bytes()
        if not _MENTIONS.search(source):
            continue
        for name in _names(ast.parse(source)):
            found.setdefault(name, str(path.relative_to(directory.parent)))
    return found


def _names(tree: ast.AST) -> Iterator[str]:
    constants = {
        target.id: node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        key = _key(node)
        name = constants.get(key.id) if isinstance(key, ast.Name) else getattr(key, "value", None)
        if isinstance(name, str) and _NAME.fullmatch(name):
            yield name


def _key(node: ast.AST) -> ast.AST | None:
    """Return the expression that names the variable if `node` reads one."""
    if isinstance(node, ast.Subscript) and _is_environment(node.value):
        return node.slice
    if isinstance(node, ast.Compare) and any(_is_environment(other) for other in node.comparators):
        return node.left
    if isinstance(node, ast.Call) and node.args:
        return node.args[0] if _reads(node.func) else None
    return None


def _reads(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return (
            function.id == "getenv"
            or (function.id in _READERS and function.id.startswith("env"))
            or "env" in function.id.lower()
        )
    if isinstance(function, ast.Attribute):
        if function.attr in _READERS and function.attr != "getenv":
            return _is_environment(function.value)
        return "getenv" in function.attr.lower() or "env" in function.attr.lower()
    return False


def _is_environment(node: ast.expr) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in ("environ", "environb")
    return isinstance(node, ast.Name) and node.id in ("environ", "env")
