"""Packages import only packages of lower layers. The tests parse the source and import nothing.

A package is a top-level package or module of coldstart. Lazy and type-only imports count, between packages and in a package,
whose modules must not form a cycle: it would mean that a part knows the whole from which it was extracted.
"""

import ast
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
DIRECTORIES = {"coldstart.artifacts": "artifacts", "coldstart.commands": "commands", "coldstart": "coldstart"}

# From the lowest layer: a package imports packages of lower layers only.
LAYERS = [
    frozenset(layer.split()) for layer in (
        "artifacts", "errors", "contract units", "system", "models", "weights graphs scheduling", "vllm", "launch",
        "materialize", "validate", "api", "bench", "host", "fleet", "lab", "commands",
    )
]  # fmt: skip
# External modules that a package must not import.
FOREIGN = {
    "artifacts": ("torch", "vllm", "typer"),
    "api": ("torch", "vllm", "typer"),
    "commands": ("torch", "vllm"),
    "contract": ("torch", "vllm", "typer", "numpy"),
    "scheduling": ("torch", "vllm"),
    # What vLLM requires anyhow is not declared for these.
    **dict.fromkeys(("graphs", "models", "vllm"), ("pandas", "requests")),
    "lab": ("torch", "vllm", "typer", "ray"),
    "fleet": ("torch", "vllm", "typer"),
    "host": ("torch", "vllm", "typer", "ray"),
}


@dataclass(frozen=True)
class Import:
    """One import: importing module, imported module or name, and whether it is imported at run time."""

    by: str
    of: str
    at_run_time: bool


def _modules() -> dict[str, Path]:
    found = {}
    for package, directory in DIRECTORIES.items():
        for path in sorted((ROOT / directory).rglob("*.py")):
            parts = path.relative_to(ROOT / directory).with_suffix("").parts
            found[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return found


def _type_only(nodes: Iterable[ast.AST]) -> set[ast.AST]:
    guards = (node for node in nodes if isinstance(node, ast.If) and _asks_for_types(node.test))
    return {inner for guard in guards for statement in guard.body for inner in ast.walk(statement)}


def _asks_for_types(test: ast.expr) -> bool:
    name = test.id if isinstance(test, ast.Name) else test.attr if isinstance(test, ast.Attribute) else ""
    return name == "TYPE_CHECKING"


def _imports(module: str, text: bytes, known: Iterable[str]) -> Iterator[Import]:
    nodes, ours = list(ast.walk(ast.parse(text))), set(known)
    typed = _type_only(nodes)
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module if not node.level else _absolute(module, node)
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            # `from a.b import c`: the module a.b.c where there is one, else a name in a.b.
            of = name if name in ours or not isinstance(node, ast.ImportFrom) else name.rpartition(".")[0]
            yield Import(module, of, node not in typed)


def _absolute(module: str, node: ast.ImportFrom) -> str:
    base = module.split(".")[: -node.level]
    return ".".join([*base, node.module] if node.module else base)


def package_name(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def _ours(name: str) -> bool:
    return name == "coldstart" or name.startswith("coldstart.")


MODULES = _modules()
PACKAGES = sorted({package_name(name) for name in MODULES} - {""})


@cache
def list_imports() -> list[Import]:
    return [one for name, path in MODULES.items() for one in _imports(name, path.read_bytes(), MODULES)]


def test_every_package_has_a_layer() -> None:
    named = [package for layer in LAYERS for package in layer]
    assert sorted(named) == PACKAGES


def _upward(imports: Iterable[Import]) -> list[str]:
    floor = {package: number for number, layer in enumerate(LAYERS) for package in layer}
    crossing = [
        (one, package_name(one.by), package_name(one.of))
        for one in imports
        if _ours(one.of) and package_name(one.of) and package_name(one.by) != package_name(one.of)
    ]
    return [
        f"{one.by} imports {one.of}"
        for one, by, of in crossing
        if by and floor.get(by, 0) <= floor.get(of, 99)
    ]


def test_package_imports_only_lower_packages() -> None:
    assert len(list_imports()) > 1000
    assert _upward(list_imports()) == []


@pytest.mark.parametrize(
    ("package", "foreign"),
    [
        ("coldstart.host", ("aiohttp", "starlette", "uvicorn", "httptools", "prometheus_client")),
        ("coldstart.fleet", ("aiohttp", "starlette", "uvicorn", "httptools", "prometheus_client", "ray")),
    ],
)
def test_decisions_of_host_and_fleet_do_no_network_io(package: str, foreign: tuple[str, ...]) -> None:
    live = (f"{package}.live", f"{package}.live.")
    pure = [one for one in list_imports() if one.by.startswith(f"{package}.") and not _below(one.by, live)]
    assert pure and [one for one in pure if one.of.split(".")[0] in foreign] == []
    assert [one for one in pure if _below(one.of, live)] == []


def _below(module: str, package: tuple[str, str]) -> bool:
    return module == package[0] or module.startswith(package[1])


@pytest.mark.parametrize("package", FOREIGN)
def test_package_imports_no_forbidden_module(package: str) -> None:
    imported = {
        (one.by, one.of) for one in list_imports() if package_name(one.by) == package and not _ours(one.of)
    }
    assert [pair for pair in imported if pair[1].split(".")[0] in FOREIGN[package]] == []


def _require_no_cycle(imports: Iterable[Import]) -> None:
    """Raise CycleError, which names a cycle. A module and its package's `__init__` cannot form one."""
    edges: dict[str, set[str]] = {}
    for one in imports:
        if one.of in MODULES and one.of != one.by:
            edges.setdefault(one.by, set()).add(one.of)
    TopologicalSorter(edges).prepare()


def test_run_time_imports_have_no_cycle() -> None:
    _require_no_cycle(one for one in list_imports() if one.at_run_time)


def test_modules_of_one_package_import_each_other_without_cycles() -> None:
    imports = list_imports()
    _require_no_cycle(one for one in imports if one.by.rpartition(".")[0] == one.of.rpartition(".")[0])


def test_packages_are_imported_by_their_installed_names() -> None:
    assert [one for one in list_imports() if one.of.split(".")[0] in ("artifacts", "commands", "tests")] == []


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# What a package may import besides `dependencies`.
EXTRAS = {"host": ("host",), "fleet": ("fleet",), "lab": ("lab",), "weights": ("s3",)}
ENGINE = ("vllm", "graphs", "models")
# Names of imports that differ from the name of their distribution.
DISTRIBUTIONS = {"pynvml": "nvidia-ml-py", "google": "protobuf", "yaml": "pyyaml"}


def _declared(lines: Iterable[str]) -> set[str]:
    """Return the names in a list of requirements; an extra of this project stands for its own list."""
    names: set[str] = set()
    for requirement in map(Requirement, lines):
        extras = requirement.extras if requirement.name == PROJECT["name"] else ()
        own = (_declared(PROJECT["optional-dependencies"][extra]) for extra in extras)
        names |= set().union(*own) if extras else {canonicalize_name(requirement.name)}
    return names


def _allowed(package: str) -> set[str]:
    extras = (_declared(PROJECT["optional-dependencies"][extra]) for extra in EXTRAS.get(package, ()))
    return _declared(PROJECT["dependencies"]).union(*extras)


def _imported() -> set[tuple[str, str]]:
    """Return (module, distribution) of each import, lazy and type-only imports included."""
    own = sys.stdlib_module_names | {"coldstart"}
    names = ((one.by, one.of.partition(".")[0]) for one in list_imports())
    return {(by, canonicalize_name(DISTRIBUTIONS.get(name, name))) for by, name in names if name not in own}


def test_each_import_is_declared_by_the_part_that_needs_it() -> None:
    found = [(by, name) for by, name in _imported() if package_name(by) not in ENGINE]
    assert [(by, name) for by, name in found if name not in _allowed(package_name(by))] == []


def test_each_dependency_is_imported() -> None:
    declared = set().union(*map(_allowed, (*EXTRAS, "all")))
    assert declared <= {name for _, name in _imported()}
