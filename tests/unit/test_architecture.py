"""Dependencies run one way: commands -> coldstart -> artifacts. Read from the source; nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = {"coldstart.artifacts": "artifacts", "coldstart.commands": "commands", "coldstart": "coldstart"}
FORBIDDEN = {
    "artifacts": ("torch", "vllm", "typer", "coldstart!artifacts"),
    "coldstart": ("coldstart.commands",),
    "commands": ("vllm", "torch"),
}
MAY_NAME_COMMANDS = {"commands/cli.py"}


def _modules(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))


def _imports(path: Path, package: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = (
                ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            )
            origin = ".".join(part for part in (base, node.module) if part)
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def _package(path: Path, room: str) -> str:
    name = next(package for package, directory in ROOMS.items() if directory == room)
    return ".".join([name, *path.relative_to(ROOT / room).parent.parts])


def _breaks(imported: str, rule: str) -> bool:
    if rule == "coldstart!artifacts":
        return _below(imported, "coldstart") and not _below(imported, "coldstart.artifacts")
    return _below(imported, rule)


def _below(imported: str, package: str) -> bool:
    return imported == package or imported.startswith(f"{package}.")


def _violations(room: str) -> list[str]:
    return [
        f"{path.relative_to(ROOT)} imports {imported}"
        for path in _modules(room)
        if str(path.relative_to(ROOT)) not in MAY_NAME_COMMANDS
        for imported in _imports(path, _package(path, room))
        if any(_breaks(imported, rule) for rule in FORBIDDEN[room])
    ]


@pytest.mark.parametrize("room", FORBIDDEN)
def test_a_room_imports_only_what_lies_below_it(room: str) -> None:
    assert _modules(room)
    assert _violations(room) == []


@pytest.mark.parametrize("room", FORBIDDEN)
def test_rooms_are_imported_by_their_installed_names(room: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {imported}"
        for path in _modules(room)
        for imported in _imports(path, _package(path, room))
        if imported.split(".")[0] in ("artifacts", "commands")
    ]
    assert wrong == []


def test_the_rule_would_be_noticed_if_broken(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import torch.nn\nfrom coldstart.key import keys\nfrom .. import cli\n")
    found = list(_imports(tmp_path / "bad.py", "coldstart.artifacts"))
    assert found == ["torch.nn", "coldstart.key.keys", "coldstart.cli"]
    assert all(any(_breaks(name, rule) for rule in FORBIDDEN["artifacts"]) for name in found)
    assert not _breaks("coldstart.artifacts.tar", "coldstart!artifacts")
