"""Modules of one package import each other without cycles. Read from the source; nothing is imported.

Type-only and lazy imports count. A cycle of modules means that a part knows the whole from which it was extracted.
Layers between packages are the subject of test_architecture.
"""

from __future__ import annotations

from collections.abc import Iterable

from tests.unit.test_architecture import MODULES, Import, _circles, _every_import, _imports


def _package(module: str) -> str:
    return module.rpartition(".")[0]


def _cycles(imports: Iterable[Import]) -> set[frozenset[str]]:
    """Return the cycles between modules of one package."""
    edges: dict[str, set[str]] = {}
    for one in imports:
        if one.of in MODULES and one.of != one.by and _package(one.of) == _package(one.by):
            edges.setdefault(one.by, set()).add(one.of)
    return {frozenset(cycle) for cycle in _circles(edges)}


def test_modules_of_one_package_import_each_other_without_cycles() -> None:
    assert sorted(map(sorted, _cycles(_every_import()))) == []


def test_type_only_and_lazy_imports_close_a_cycle() -> None:
    whole = b"from coldstart.fleet.live.front import FleetFront\n"
    type_only = b"if TYPE_CHECKING:\n from coldstart.fleet.live.control import FleetControl\n"
    lazy = b"def f():\n from coldstart.fleet.live import control\n"
    for part in (type_only, lazy):
        found = [
            *_imports("coldstart.fleet.live.control", whole, MODULES),
            *_imports("coldstart.fleet.live.front", part, MODULES),
        ]
        assert _cycles(found) == {frozenset({"coldstart.fleet.live.control", "coldstart.fleet.live.front"})}


def test_imports_of_another_package_close_no_cycle() -> None:
    found = [
        Import("coldstart.fleet.live.control", "coldstart.fleet.core", True),
        Import("coldstart.fleet.core", "coldstart.fleet.live.control", True),
    ]
    assert _cycles(found) == set()
