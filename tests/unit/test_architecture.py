"""Dependencies run one way, room by room. Read from the source; nothing is imported.

A room is a top-level package or module of ours. Lazy and type-only imports count between rooms; inside a room only what is
imported at run time counts, and nothing there may run in a circle.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {"coldstart.artifacts": "artifacts", "coldstart.commands": "commands", "coldstart": "coldstart"}

# From the ground up: a room imports rooms of the layers below its own, and none beside or above it.
LAYERS: tuple[frozenset[str], ...] = tuple(
    frozenset(layer.split())
    for layer in (
        "errors artifacts",
        "contract units",
        "system",
        "models",
        "weights graphs scheduling",
        "vllm",
        "launch",
        "materialize",
        "validate",
        "bench",
        "host",
        "fleet",
        "lab",
        "commands",
    )
)
# What a server needs to be built, checked and started; it works without the packages in BEYOND_CORE.
BEYOND_CORE = frozenset(["host", "fleet", "bench", "lab", "commands"])
CORE = frozenset(room for layer in LAYERS for room in layer) - BEYOND_CORE
# What a room must not import of the outside world; everything else is nobody's business but mypy's.
FOREIGN = {
    "artifacts": ("torch", "vllm", "typer"),
    "commands": ("torch", "vllm"),
    "contract": ("torch", "vllm", "typer", "numpy"),
    "scheduling": ("torch", "vllm"),
    "lab": ("torch", "vllm", "typer", "ray"),
    "fleet": ("torch", "vllm", "typer"),
    "host": ("torch", "vllm", "typer", "ray"),
}
MOST_ROOMS = 18
# Public classes of one name in two rooms, and why a reader is not misled. Any other name stands for one class.
SHARED_NAMES = {
    "Policy": "the order of jobs in scheduling, what leaves in host: the field's word for both",
    "Started": "an event in host; in the vLLM scheduler the requests that have started, which nothing else names",
    "State": "of a model in host, of a request in the vLLM scheduler: each is read beside its machine alone",
}


@dataclass(frozen=True)
class Import:
    """One import: by which module, of which (a module of ours where it is one), and whether at run time."""

    by: str
    of: str
    at_run_time: bool


def _modules() -> dict[str, Path]:
    found = {}
    for package, directory in PACKAGES.items():
        for path in sorted((ROOT / directory).rglob("*.py")):
            parts = path.relative_to(ROOT / directory).with_suffix("").parts
            found[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return found


def _type_only(tree: ast.Module) -> set[ast.AST]:
    guards = (node for node in ast.walk(tree) if isinstance(node, ast.If) and _asks_for_types(node.test))
    return {inner for guard in guards for statement in guard.body for inner in ast.walk(statement)}


def _asks_for_types(test: ast.expr) -> bool:
    name = test.id if isinstance(test, ast.Name) else test.attr if isinstance(test, ast.Attribute) else ""
    return name == "TYPE_CHECKING"


def _imports(module: str, text: bytes, known: Iterable[str]) -> Iterator[Import]:
    tree, ours = ast.parse(text), set(known)
    typed = _type_only(tree)
    for node in ast.walk(tree):
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


def _room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def _ours(name: str) -> bool:
    return name == "coldstart" or name.startswith("coldstart.")


MODULES = _modules()
IMPORTS = [one for name, path in MODULES.items() for one in _imports(name, path.read_bytes(), MODULES)]
ROOMS = sorted({_room(name) for name in MODULES} - {""})


def test_every_room_has_its_layer_and_every_layer_its_rooms() -> None:
    named = [room for layer in LAYERS for room in layer]
    assert sorted(named) == ROOMS
    assert len(ROOMS) <= MOST_ROOMS


def _upward(imports: Iterable[Import]) -> list[str]:
    floor = {room: number for number, layer in enumerate(LAYERS) for room in layer}
    crossing = [
        (one, _room(one.by), _room(one.of))
        for one in imports
        if _ours(one.of) and _room(one.of) and _room(one.by) != _room(one.of)
    ]
    return [
        f"{one.by} imports {one.of}"
        for one, by, of in crossing
        if by and floor.get(by, 0) <= floor.get(of, 99)
    ]


def test_a_room_imports_only_what_lies_below_it() -> None:
    assert len(IMPORTS) > 1000
    assert _upward(IMPORTS) == []


def _beyond_core(imports: Iterable[Import]) -> list[str]:
    return [
        f"{one.by} imports {one.of}"
        for one in imports
        if _room(one.by) in CORE and _ours(one.of) and _room(one.of) in BEYOND_CORE
    ]


def test_the_core_imports_nothing_beyond_it() -> None:
    assert _beyond_core(IMPORTS) == []


def test_the_core_needs_no_library_of_tables_plots_or_requests() -> None:
    found = {(one.by, one.of) for one in IMPORTS if _room(one.by) in CORE}
    assert [
        pair for pair in found if pair[1].split(".")[0] in ("pandas", "bokeh", "pyarrow", "requests")
    ] == []


def test_the_benchmark_imports_nothing_that_only_explains_results() -> None:
    assert [one for one in IMPORTS if _room(one.by) == "bench" and _room(one.of) == "lab"] == []


@pytest.mark.parametrize(
    ("package", "foreign"),
    [
        ("coldstart.host", ("aiohttp", "starlette", "uvicorn", "httptools", "prometheus_client")),
        ("coldstart.fleet", ("aiohttp", "starlette", "uvicorn", "httptools", "prometheus_client", "ray")),
    ],
)
def test_decisions_of_host_and_fleet_do_no_network_io(package: str, foreign: tuple[str, ...]) -> None:
    live = (f"{package}.live", f"{package}.live.")
    pure = [one for one in IMPORTS if one.by.startswith(f"{package}.") and not _below(one.by, live)]
    assert pure and [one for one in pure if one.of.split(".")[0] in foreign] == []
    assert [one for one in pure if _below(one.of, live)] == []


def _below(module: str, package: tuple[str, str]) -> bool:
    return module == package[0] or module.startswith(package[1])


@pytest.mark.parametrize("room", FOREIGN)
def test_a_room_leaves_alone_what_it_must_not_know(room: str) -> None:
    imported = {(one.by, one.of) for one in IMPORTS if _room(one.by) == room and not _ours(one.of)}
    assert [pair for pair in imported if pair[1].split(".")[0] in FOREIGN[room]] == []


def _circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Tarjan's strongly connected components of more than one node, each sorted."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in edges.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            position = stack.index(node)
            component = stack[position:]
            del stack[position:]
            if len(component) > 1:
                found.append(sorted(component))

    for node in edges:
        if node not in index:
            visit(node)
    return found


def _run_time_edges(imports: Iterable[Import]) -> dict[str, set[str]]:
    edges: dict[str, set[str]] = {name: set() for name in MODULES}
    for one in imports:
        # A package's own __init__ stands for no file that could import back.
        if one.at_run_time and one.of in MODULES and one.of != one.by:
            edges.setdefault(one.by, set()).add(one.of)
    return edges


def test_nothing_runs_in_a_circle() -> None:
    assert _circles(_run_time_edges(IMPORTS)) == []


@pytest.mark.parametrize("room", ["host", "fleet"])
def test_imports_run_in_no_circle_when_type_only_ones_count(room: str) -> None:
    inside = [replace(one, at_run_time=True) for one in IMPORTS if _room(one.by) == _room(one.of) == room]
    assert inside and _circles(_run_time_edges(inside)) == []


def test_rooms_are_imported_by_their_installed_names() -> None:
    assert [one for one in IMPORTS if one.of.split(".")[0] in ("artifacts", "commands", "tests")] == []


def _classes(text: bytes) -> Iterator[str]:
    return (node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef))


def _ambiguous(classes: Iterable[str]) -> set[str]:
    return {name for name, count in Counter(classes).items() if count > 1 and not name.startswith("_")}


def test_a_public_class_name_stands_for_one_class() -> None:
    classes = [name for path in MODULES.values() for name in _classes(path.read_bytes())]
    assert len(classes) > 300
    assert _ambiguous(classes) == set(SHARED_NAMES)


class TestTheRulesWouldBeNoticedIfBroken:
    """The same readings over sources that break them."""

    def test_imports_of_every_kind_are_seen(self) -> None:
        text = b"import torch.nn\nfrom coldstart.models import keys\ndef f():\n from .. import cli\n"
        text += b"if TYPE_CHECKING:\n from coldstart.launch import ladder\n"
        found = set(_imports("coldstart.artifacts.bad", text, MODULES))
        assert found == {
            Import("coldstart.artifacts.bad", "torch.nn", True),
            Import("coldstart.artifacts.bad", "coldstart.models.keys", True),
            Import("coldstart.artifacts.bad", "coldstart", True),
            Import("coldstart.artifacts.bad", "coldstart.launch.ladder", False),
        }
        assert len(_upward(found)) == 2

    def test_a_room_beside_is_no_room_below(self) -> None:
        assert _upward([Import("coldstart.graphs.tables", "coldstart.weights.weights_plan", True)])
        assert not _upward([Import("coldstart.graphs.tables", "coldstart.contract.plan", True)])

    def test_a_core_module_that_imports_beyond_the_core_is_seen(self) -> None:
        text = (
            b"def f():\n from coldstart.bench import facts\nif TYPE_CHECKING:\n import coldstart.host.core\n"
        )
        bad, good = "coldstart.validate.bad", "coldstart.lab.good"
        assert len(_beyond_core(_imports(bad, text, MODULES))) == 2
        assert _beyond_core(_imports(good, text, MODULES)) == []

    def test_two_classes_of_one_name_are_seen(self) -> None:
        one, other = (
            b"class Source: ...\nclass _Own: ...\n",
            b"if True:\n class Source: ...\nclass _Own: ...\n",
        )
        assert _ambiguous([*_classes(one), *_classes(other)]) == {"Source"}
        assert _ambiguous(_classes(one)) == set()

    def test_a_circle_is_found(self) -> None:
        assert _circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
        assert _circles({"a": {"b"}, "b": set()}) == []
