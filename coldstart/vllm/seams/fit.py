"""Does a seam fit what stands in the sources? Each problem is one sentence that names the seam.

called        every name that we give is taken, positional ones in our order; nothing else is required (but `*args`:
              whoever calls gives more)
overridden    the parameters are ours, no more and no fewer, unless we take `*args` or `**kwargs`
subclassed    no abstract method is left that we do not write
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from coldstart.vllm.seams.seam import Seam
from coldstart.vllm.seams.source_tree import Definition, Missing, Sources


@dataclass(frozen=True)
class Parameters:
    """Of one callable, by name; `required` have no default."""

    positional: tuple[str, ...]
    keyword: tuple[str, ...]
    required: frozenset[str]
    star: bool
    stars: bool

    @classmethod
    def from_arguments(cls, arguments: ast.arguments) -> Parameters:
        positional = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
        keyword = [one.arg for one in arguments.kwonlyargs]
        bare = positional[: len(positional) - len(arguments.defaults)]
        bare += [
            name for name, default in zip(keyword, arguments.kw_defaults, strict=True) if default is None
        ]
        star, stars = arguments.vararg is not None, arguments.kwarg is not None
        return cls(tuple(positional), tuple(keyword), frozenset(bare), star, stars)

    @classmethod
    def stated(cls, shape: str) -> Parameters:
        """Of a shape in the table."""
        (stated,) = ast.parse(f"def {shape}: ...").body
        assert isinstance(stated, ast.FunctionDef)
        return cls.from_arguments(stated.args)

    def __str__(self) -> str:
        parts = [*self.positional, *(["*args"] if self.star else []), *(f"{name}=" for name in self.keyword)]
        return f"({', '.join([*parts, *(['**kwargs'] if self.stars else [])])})"


def problems(seam: Seam, sources: Sources) -> Iterator[str]:
    """What is missing or of another shape."""
    try:
        definition = sources.find(seam.module, seam.path)
    except Missing as missing:
        yield str(missing)
        return
    except (OSError, SyntaxError, ValueError) as error:
        yield f"{seam.name} cannot be read: {error}"
        return
    yield from (f"{seam.name} does not say {text!r}" for text in seam.says if text not in definition.text)
    if seam.call and (wrong := _misfit(seam.call, _constructor(definition, sources), called=True)):
        yield f"{seam.name} {wrong}"
    yield from _members(seam, definition, sources)


def _members(seam: Seam, definition: Definition, sources: Sources) -> Iterator[str]:
    if not seam.members:
        return
    if not isinstance(definition.node, ast.ClassDef):
        yield f"{seam.name} is no class"
        return
    members = sources.members(definition)
    yield from (f"{seam.name} has no {name}" for name in sorted(seam.members - members.keys()))
    for shapes, called in ((seam.calls, True), (seam.overrides, False)):
        for shape in shapes:
            name = shape.partition("(")[0]
            if name in members and (wrong := _misfit(shape, _parameters(members[name]), called=called)):
                yield f"{seam.name}.{name} {wrong}"
    if seam.overrides:
        yield from (f"{seam.name} wants {name}" for name in _abstract(members) if name not in seam.members)


def _misfit(shape: str, actual: Parameters | None, *, called: bool) -> str | None:
    """What is wrong, None where it fits or is no function whose parameters can be seen."""
    wanted = Parameters.stated(shape)
    if actual is None:
        return None
    fits = _takes(wanted, actual) if called else _same(wanted, actual)
    return None if fits else f"takes {actual}, expected {wanted}"


def _takes(wanted: Parameters, actual: Parameters) -> bool:
    named = wanted.positional[: len(actual.positional)]
    given = {*wanted.positional, *wanted.keyword}
    return (
        actual.positional[: len(named)] == named
        and (actual.star or len(named) == len(wanted.positional))
        and (actual.stars or set(wanted.keyword) <= {*actual.positional, *actual.keyword})
        and (wanted.star or actual.required <= given)
    )


def _same(wanted: Parameters, actual: Parameters) -> bool:
    names = actual.positional if not wanted.star else actual.positional[: len(wanted.positional)]
    return names == wanted.positional and (wanted.stars or set(actual.keyword) == set(wanted.keyword))


def _parameters(definition: Definition) -> Parameters | None:
    node = definition.node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return Parameters.from_arguments(node.args)
    return None


def _constructor(definition: Definition, sources: Sources) -> Parameters | None:
    """How a class is made or a function called; None where that is not to be seen."""
    if not isinstance(definition.node, ast.ClassDef):
        return _parameters(definition)
    members = sources.members(definition)
    if "__init__" in members:
        parameters = _parameters(members["__init__"])
        return parameters and Parameters(
            parameters.positional[1:],
            parameters.keyword,
            parameters.required - {"self"},
            parameters.star,
            parameters.stars,
        )
    fields = [(name, one.node) for name, one in members.items() if isinstance(one.node, ast.AnnAssign)]
    names = tuple(name for name, node in fields if not _constant(node))
    return Parameters(names, (), frozenset(), False, False) if names else None


def _constant(node: ast.AST) -> bool:
    return isinstance(node, ast.AnnAssign) and "ClassVar" in ast.unparse(node.annotation)


def _abstract(members: dict[str, Definition]) -> Iterator[str]:
    for name, one in members.items():
        decorators = getattr(one.node, "decorator_list", [])
        if any(ast.unparse(decorator).endswith("abstractmethod") for decorator in decorators):
            yield name
