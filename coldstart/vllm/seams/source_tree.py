"""Names of vLLM found in its sources by AST: nothing is imported, so a look costs neither torch nor a device.

A class's members are those of its bases within vLLM, its own, and whatever its methods set on `self`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

Callable_ = ast.FunctionDef | ast.AsyncFunctionDef
MAX_HOPS = 8


class Missing(Exception):
    """A name is not there; the message names it."""


@dataclass
class Module:
    """One parsed module. `files` of Sources tells what was read."""

    name: str
    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def names(self) -> dict[str, ast.AST]:
        """What stands at the module's top, in branches as well."""
        return {name: node for node in _top(self.tree.body) for name in _bound(node)}

    @property
    def package(self) -> str:
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]

    def origin(self, node: ast.ImportFrom) -> str:
        """The module that an import names."""
        if not node.level:
            return node.module or ""
        base = self.package.split(".")
        kept = base[: len(base) - node.level + 1]
        return ".".join([*kept, *([node.module] if node.module else [])])


@dataclass
class Definition:
    """A definition and the module that it stands in."""

    module: Module
    node: ast.AST

    @property
    def text(self) -> str:
        """Its source."""
        if isinstance(self.node, ast.Module):
            return self.module.text
        first, last = getattr(self.node, "lineno", 1), getattr(self.node, "end_lineno", None)
        return "\n".join(self.module.text.splitlines()[first - 1 : last])


@dataclass
class Sources:
    """The sources below `root`, the directory that holds `vllm/`; `read` are the files that were looked for."""

    root: Path
    read: dict[Path, None] = field(default_factory=dict)
    _modules: dict[str, Module | None] = field(default_factory=dict)

    def module(self, name: str) -> Module | None:
        """A module, or None where there is no such file."""
        if name not in self._modules:
            self._modules[name] = self._load(name)
        held = self._modules[name]
        # Also where it is looked for and not found: it may come to be there.
        self.read.update(dict.fromkeys([held.path] if held else self._places(name)))
        return held

    def find(self, module: str, path: str) -> Definition:
        """The definition behind `module:path`, through whatever imports. Raises Missing."""
        held = self.module(module)
        if held is None:
            raise Missing(f"there is no module {module}")
        definition = Definition(held, held.tree)
        for name in filter(None, path.split(".")):
            definition = self._inside(definition, name, f"{module}:{path}")
        return definition

    def members(self, definition: Definition, hops: int = MAX_HOPS) -> dict[str, Definition]:
        """A class's members by name, its bases' included."""
        node, held = definition.node, dict[str, Definition]()
        if not isinstance(node, ast.ClassDef) or not hops:
            return held
        for base in reversed(node.bases):
            if (above := self._base(definition.module, base)) is not None:
                held |= self.members(above, hops - 1)
        own = [(name, stated) for stated in _top(node.body) for name in _bound(stated)]
        held |= {name: Definition(definition.module, on) for name, on in _on_self(node) if name not in held}
        return held | {name: Definition(definition.module, stated) for name, stated in own}

    def _places(self, name: str) -> tuple[Path, Path]:
        place = self.root.joinpath(*name.split("."))
        return place.with_suffix(".py"), place / "__init__.py"

    def _load(self, name: str) -> Module | None:
        for path in filter(Path.is_file, self._places(name)):
            return Module(name, path, path.read_text(encoding="utf-8"))
        return None

    def _inside(self, definition: Definition, name: str, wanted: str) -> Definition:
        if isinstance(definition.node, ast.ClassDef):
            held = self.members(definition)
            if name in held:
                return held[name]
        elif (inside := self._named(definition.module, name)) is not None:
            return inside
        raise Missing(f"there is no {wanted}")

    def _named(self, module: Module, name: str, hops: int = MAX_HOPS) -> Definition | None:
        node = module.names.get(name)
        if node is None:
            return self._starred(module, name, hops)
        if not isinstance(node, ast.ImportFrom | ast.Import):
            return Definition(module, node)
        if isinstance(node, ast.Import) or not hops:
            return Definition(module, node)
        alias = next(one for one in node.names if (one.asname or one.name) == name)
        origin = self.module(module.origin(node))
        if origin is None:
            # Compiled or generated, or not of vLLM: it is imported, and that is all there is to see.
            return Definition(module, node)
        return self._named(origin, alias.name, hops - 1) or self._submodule(origin, alias.name)

    def _starred(self, module: Module, name: str, hops: int) -> Definition | None:
        """A name that `from x import *` brings."""
        for node in _top(module.tree.body) if hops else ():
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                origin = self.module(module.origin(node))
                if origin is not None and (definition := self._named(origin, name, hops - 1)):
                    return definition
        return None

    def _submodule(self, package: Module, name: str) -> Definition | None:
        held = self.module(f"{package.name}.{name}")
        return Definition(held, held.tree) if held is not None else None

    def _base(self, module: Module, base: ast.expr) -> Definition | None:
        node = base.value if isinstance(base, ast.Subscript) else base
        return self._named(module, node.id) if isinstance(node, ast.Name) else None


def _top(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, and those of branches, which stand at the same level."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from _top(getattr(node, part, []))
        for handler in getattr(node, "handlers", []):
            yield from _top(handler.body)


def _bound(node: ast.stmt) -> Iterator[str]:
    """The names that a statement binds."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.Assign):
        yield from (
            one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)
        )
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id


def _on_self(node: ast.ClassDef) -> Iterator[tuple[str, ast.AST]]:
    """What methods set on `self`."""
    for one in ast.walk(node):
        targets = one.targets if isinstance(one, ast.Assign) else [getattr(one, "target", None)]
        for target in (part for whole in targets if whole is not None for part in ast.walk(whole)):
            is_self = isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name)
            if is_self and target.value.id == "self" and isinstance(target.ctx, ast.Store):  # type: ignore[attr-defined]
                yield target.attr, one  # type: ignore[attr-defined]
