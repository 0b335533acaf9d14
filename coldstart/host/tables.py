"""TOML tables, read from a file and decoded into dataclasses by the types of the fields.

A field of type `Size` takes bytes or text such as "14GiB", `Rate` the same per second, `Seconds` a finite number from 0.
Invariant: every error names the key and what was found there.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from math import isfinite
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from coldstart.artifacts import files
from coldstart.errors import UsageError, describe
from coldstart.units import parse_size

T = TypeVar("T")
_EXPECTED = {
    str: ("a string", '"text"'),
    bool: ("true or false", "true"),
    int: ("an integer", "4"),
    float: ("a number", "1.5"),
    list: ("a list", '["one", "two"]'),
}


def parse_seconds(given: object) -> float:
    """Return a time in seconds. Raises UsageError unless `given` is a finite number from 0."""
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not (isfinite(given) and given >= 0):
        raise UsageError(f"invalid time {given!r}", hint="write seconds from 0, such as 8.0")
    return float(given)


Size = Annotated[int, parse_size]
Rate = Annotated[float, parse_size]
Seconds = Annotated[float, parse_seconds]


def read_toml(path: Path, kind: str) -> dict[str, Any]:
    """Return the content of a file that errors call the `kind` file. Raises UsageError if it cannot be read."""
    try:
        return tomllib.loads(files.read_text(path))
    except OSError as error:
        raise UsageError(
            f"cannot read the {kind} file {path}: {error.strerror}", hint="name a file that can be read"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"the {kind} file {path} is not TOML: {describe(error)}", hint=_describe_fix(path, error)
        ) from error


def _describe_fix(path: Path, error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"save {path} as text in UTF-8"
    line = re.search(r"line \d+", str(error))
    return (
        f"fix {line[0] if line else 'the end'} of {path}: write [TABLE] or KEY = VALUE, with text in quotes"
    )


def decode(kind: type[T], table: object, place: str = "", **given: object) -> T:
    """Return the dataclass `kind` from `table`.

    Args:
        kind: Dataclass whose fields are the keys of the table.
        table: Content of the file at `place`.
        place: Dotted name of the table; empty for the file's top level.
        given: Fields that the caller sets and that the table must not.

    Raises:
        UsageError: A key is unknown or missing, or its value has the wrong type.
    """
    content = expect_table(table, place)
    own = [field for field in fields(kind) if field.name not in given]  # type: ignore[arg-type]
    needed = [one.name for one in own if one.default is MISSING and one.default_factory is MISSING]
    reject_unknown_keys(content, [one.name for one in own], place)
    require_keys(content, needed, place)
    types = get_type_hints(kind, include_extras=True)
    found = {name: _decoded(types[name], one, _at(place, name)) for name, one in content.items()}
    return kind(**given, **found)


def expect_table(given: object, place: str) -> dict[str, Any]:
    """Return `given`. Raises UsageError if it is not a table."""
    if not isinstance(given, dict):
        raise UsageError(
            f"{place}: expected a table, found {given!r}", hint=f"write [{place}] and its keys below"
        )
    return given


def reject_unknown_keys(table: Mapping[str, Any], known: Collection[str], place: str) -> None:
    """Raise UsageError if the table has keys other than those `known`."""
    if unknown := sorted(table.keys() - set(known)):
        message = f"unknown key {', '.join(unknown)}"
        raise UsageError(_named(place, message), hint=f"known keys: {', '.join(sorted(known))}")


def require_keys(table: Mapping[str, Any], needed: Collection[str], place: str) -> None:
    """Raise UsageError if one of the keys `needed` is missing."""
    if missing := sorted(set(needed) - table.keys()):
        where = f"[{place}]" if place else "the top of the file"
        raise UsageError(_named(place, f"missing key {', '.join(missing)}"), hint=f"add it to {where}")


def require_at_least(key: str, found: float, least: int) -> None:
    """Raise UsageError if the value of a key is below `least`."""
    if found < least:
        raise UsageError(
            f"{key}: expected {least} or more, found {found}", hint=f"write {key} = {least}, or more"
        )


def parse_at(place: str, parse: Callable[[object], T], given: object) -> T:
    """Parse `given` with `parse`; prefix the message of its UsageError with the place."""
    try:
        return parse(given)
    except UsageError as error:
        raise UsageError(f"{place}: {error.message}", hint=error.hint) from error


def _decoded(kind: Any, given: object, place: str) -> Any:
    origin = get_origin(kind)
    if origin is Annotated:
        return parse_at(place, kind.__metadata__[0], given)
    if origin in (Union, UnionType):
        return _decoded(get_args(kind)[0], given, place)
    if origin is tuple:
        (item, _), found = get_args(kind), _expect(list, given, place)
        return tuple(_decoded(item, one, f"{place}[{number}]") for number, one in enumerate(found))
    if is_dataclass(kind):
        return decode(kind, given, place)  # type: ignore[arg-type]
    if issubclass(kind, StrEnum):
        if given not in tuple(kind):
            raise UsageError(f"{place}: unknown value {given!r}", hint=f"use one of: {', '.join(kind)}")
        return kind(given)
    if issubclass(kind, tuple):
        return kind(_decoded(tuple[str, ...], given, place))
    return _expect(kind, given, place)


def _expect(kind: type, given: object, place: str) -> Any:
    accepted = (int, float) if kind is float else kind
    if not isinstance(given, accepted) or isinstance(given, bool) != (kind is bool):
        name, example = _EXPECTED[kind]
        hint = f"write {name}, such as {example}"
        raise UsageError(f"{place}: expected {name}, found {given!r}", hint=hint)
    return given


def _at(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key


def _named(place: str, message: str) -> str:
    return f"{place}: {message}" if place else message
