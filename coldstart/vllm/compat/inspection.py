"""Find parts of a vLLM integration point that are missing or have another signature in the installed vLLM.

A call fits if the function takes every argument that we pass, under the expected name, and requires no others. An override
fits if it takes the arguments of vLLM's method. Our subclasses must implement all abstract methods.
"""

from __future__ import annotations

import dis
import functools
import importlib
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from coldstart.vllm.compat.points import Point

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def problems(point: Point) -> Iterator[str]:
    """Yield what is missing or differs, one sentence part each."""
    try:
        owner = _find(point)
        yield from (f"{point.name} {problem}" for problem in _problems(point, owner))
    except Exception as error:  # noqa: BLE001 - any error of an unknown vLLM is a reason, not a failure
        yield f"{point.name} cannot be used: {type(error).__name__}: {error}"


def _find(point: Point) -> Any:
    return functools.reduce(getattr, filter(None, point.path.split(".")), _import(point))


def _import(point: Point) -> ModuleType:
    try:
        return importlib.import_module(point.module)
    except ModuleNotFoundError:
        if not point.moved:
            raise
        return importlib.import_module(point.moved)


def _problems(point: Point, owner: Any) -> Iterator[str]:
    missing = {name for name in point.members if not _has(owner, name)}
    yield from (f"has no {name}" for name in sorted(missing))
    yield from (f"does not contain {text!r}" for text in point.source if text not in _source(owner))
    for call in point.calls:
        name = call.partition("(")[0]
        function = owner if name == point.path.rpartition(".")[2] else getattr(owner, name, None)
        if function is not None and (wrong := _call_problem(call, function)):
            yield wrong
    yield from _override_problems(owner, [name for name in point.overrides if name not in missing])


def _has(owner: Any, name: str) -> bool:
    return hasattr(owner, name) or (isinstance(owner, type) and name in _attributes(owner))


def _source(owner: Any) -> str:
    """Return the source of a function, or of the module that contains a class, because finding a class parses the module."""
    return inspect.getsource(sys.modules[owner.__module__] if isinstance(owner, type) else owner)


@functools.cache
def _attributes(owner: type) -> frozenset[str]:
    """Return the attributes that a class declares or that its methods set."""
    declared = {name for base in owner.__mro__ for name in inspect.get_annotations(base)}
    members = [member for base in owner.__mro__ for member in vars(base).values()]
    return frozenset(declared).union(*map(_stored, members))


def _stored(member: Any) -> frozenset[str]:
    code = getattr(inspect.unwrap(getattr(member, "__func__", member)), "__code__", None)
    instructions = dis.get_instructions(code) if code is not None else ()
    return frozenset(one.argval for one in instructions if one.opname == "STORE_ATTR")


def _call_problem(call: str, function: Any) -> str | None:
    """Return the mismatch of a call. Each argument is its own name, so an argument in another position is noticed."""
    positional, keywords = _words(call)
    more = positional and positional[-1].startswith("*")
    signature = _signature(function)
    bind = signature.bind_partial if more else signature.bind
    try:
        bound = bind(*(name for name in positional if name[0] != "*"), **{name: name for name in keywords})
    except TypeError as error:
        return f"takes {signature}, expected {call}: {error}"
    renamed = [name for name, value in bound.arguments.items() if isinstance(value, str) and value != name]
    return f"takes {signature}, expected {call}" if renamed else None


def _words(call: str) -> tuple[list[str], list[str]]:
    """Split "step(tokens, *, fast)" into names by position and by keyword."""
    words = [word.strip() for word in call.partition("(")[2].rstrip(")").split(",") if word.strip()]
    at = words.index("*") if "*" in words else len(words)
    return words[:at], words[at + 1 :]


def _signature(function: Any) -> inspect.Signature:
    """Return the parameters without `self`."""
    signature = inspect.signature(function)
    parameters = [one for one in signature.parameters.values() if one.name != "self"]
    return signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)


def _override_problems(owner: Any, names: list[str]) -> Iterator[str]:
    for ours in our_subclasses(owner) if names else ():
        yield from (f"requires {name}, which {ours.__name__} lacks" for name in sorted(_abstract(ours)))
        for name in names:
            if name in vars(ours) and not _takes_the_same(vars(ours)[name], getattr(owner, name)):
                yield f"takes {name}{_signature(getattr(owner, name))}, unlike {ours.__name__}"


def our_subclasses(owner: type) -> Iterator[type]:
    """Yield our imported subclasses of a vLLM class, however deep."""
    subclasses: list[type] = owner.__subclasses__()
    for one in subclasses:
        if one.__module__.startswith("coldstart."):
            yield one
        yield from our_subclasses(one)


def _abstract(ours: type) -> frozenset[str]:
    return getattr(ours, "__abstractmethods__", frozenset())


def _takes_the_same(ours: Any, theirs: Any) -> bool:
    mine, wanted = _signature(ours).parameters, _signature(theirs).parameters
    kinds = {one.kind for one in mine.values()}
    named = _names(mine, positional=True)
    vllms = _names(wanted, positional=True)
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        vllms = vllms[: len(named)]
    keywords = inspect.Parameter.VAR_KEYWORD in kinds
    return named == vllms and (keywords or _names(mine, positional=False) == _names(wanted, positional=False))


def _names(parameters: Any, *, positional: bool) -> list[str]:
    kinds = _POSITIONAL if positional else (inspect.Parameter.KEYWORD_ONLY,)
    found = [name for name, one in parameters.items() if one.kind in kinds]
    return found if positional else sorted(found)
