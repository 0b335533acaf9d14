"""Each package imports only distributions that its part of the project declares. Read from the source; nothing is imported.

Packages that run where vLLM is installed are left out: they import what vLLM requires.
"""

import sys
import tomllib
from collections.abc import Iterable

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.unit.test_architecture import ROOT, list_imports, package_name

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# What a package may import besides `dependencies`.
EXTRAS = {"host": ("host",), "fleet": ("fleet",), "lab": ("lab",), "weights": ("s3",)}
ENGINE = ("vllm", "graphs", "models")
# Names of imports that differ from the name of their distribution.
DISTRIBUTIONS = {"pynvml": "nvidia-ml-py", "google": "protobuf"}


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
