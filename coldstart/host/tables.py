"""Decode TOML tables into dataclasses by the types of their fields.

A field of type `Size` accepts a number of bytes or text such as "14GiB". `Rate` accepts the same per second. `Seconds`
accepts a finite number that is 0 or greater. Invariant: every error contains the key and the invalid value.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from math import isfinite
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from coldstart.artifacts import files
from coldstart.contract.arguments import Arguments
from coldstart.errors import UsageError, describe_reason
from coldstart.scheduling.declaration import list_settings
from coldstart.units import parse_size

T = TypeVar("T")
_EXAMPLES = {"str": '"text"', "bool": "true", "int": "4", "float": "1.5", "array": '["one", "two"]'}


def parse_seconds(given: object) -> float:
    """Return a time in seconds. Raises UsageError unless `given` is a finite number that is 0 or greater."""
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not (isfinite(given) and given >= 0):
        raise UsageError(
            f"invalid duration {given!r}", hint="use a number of seconds, 0 or more, such as 8.0"
        )
    return float(given)


Size = Annotated[int, parse_size]
Rate = Annotated[float, parse_size]
Seconds = Annotated[float, parse_seconds]


def read_toml(path: Path, kind: str) -> dict[str, Any]:
    """Read a TOML file. `kind` describes it in error messages. Raises UsageError if it cannot be read or parsed."""
    try:
        return tomllib.loads(files.read_text(path))
    except OSError as error:
        raise UsageError(
            f"cannot read the {kind} file {path}: {error.strerror}", hint="check the path and its permissions"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"cannot parse the {kind} file {path} as TOML: {describe_reason(error)}",
            hint=f"save {path} in UTF-8, with lines such as [TABLE] and KEY = VALUE, and text in quotes",
        ) from error


def decode(kind: type[T], table: object, place: str = "", **given: object) -> T:
    """Decode `table` into the dataclass `kind`.

    Args:
        kind: Dataclass whose fields are the keys of the table.
        table: Content of the table at `place`.
        place: Dotted name of the table. Empty for the top level of the file.
        given: Values of fields that the caller sets and that the table must not contain.

    Raises:
        UsageError: A key is unknown or missing, or its value has the wrong type.
    """
    content = expect_table(table, place)
    own = [field for field in fields(kind) if field.name not in given]  # type: ignore[arg-type]
    known = sorted(one.name for one in own)
    if unknown := sorted(content.keys() - set(known)):
        message = f"unknown key {', '.join(unknown)}"
        raise UsageError(_prefix_place(place, message), hint=f"use one of: {', '.join(known)}")
    needed = [one.name for one in own if one.default is MISSING and one.default_factory is MISSING]
    require_keys(content, needed, place)
    types = get_type_hints(kind, include_extras=True)
    found = {
        name: _convert(types[name], one, f"{place}.{name}" if place else name)
        for name, one in content.items()
    }
    return kind(**given, **found)


def check_ranges(settings: Any) -> None:
    """Raise UsageError if the value of any setting is outside the range that its field declares."""
    for name, one in list_settings(settings):
        try:
            one.require_valid(name, getattr(settings, name))
        except ValueError as error:
            raise UsageError(
                f"{name}: {error}", hint=f"omit {one.flag or name} to use its default"
            ) from error


def expect_table(given: object, place: str) -> dict[str, Any]:
    """Return `given` if it is a table. Otherwise raise UsageError."""
    if not isinstance(given, dict):
        raise UsageError(
            f"{place}: expected a table, found {given!r}", hint=f"add the table [{place}] with its settings"
        )
    return given


def require_keys(table: Mapping[str, Any], needed: Collection[str], place: str) -> None:
    """Raise UsageError if the table lacks any of the keys in `needed`."""
    if missing := sorted(set(needed) - table.keys()):
        where = f"[{place}]" if place else "the top of the file"
        keys = ", ".join(missing)
        raise UsageError(_prefix_place(place, f"missing key {keys}"), hint=f"add {keys} to {where}")


@contextmanager
def prefix_errors(place: str) -> Iterator[None]:
    """Prefix the message of a UsageError in the block with `place`, which names a file or a key."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{place}: {error.message}", hint=error.hint) from error


def _convert(kind: Any, given: object, place: str) -> Any:
    """Convert a TOML value to the type `kind`. If the type's annotation contains a parser, use it."""
    if get_origin(kind) in (Union, UnionType):  # TOML has no null
        kind = get_args(kind)[0]
    if (parse := next(filter(callable, getattr(kind, "__metadata__", ())), None)) is not None:
        with prefix_errors(place):
            return parse(given)
    if get_origin(kind) is tuple and is_dataclass(item := get_args(kind)[0]):
        tables = enumerate(_convert(list, given, place))
        return tuple(decode(item, one, f"{place}[{number}]") for number, one in tables)  # type: ignore[arg-type]
    try:
        return msgspec.convert(given, kind, dec_hook=decode_arguments)
    except msgspec.ValidationError as error:
        message, _, at = str(error).partition(" - at `$")
        expected = message.partition("`")[2].partition("`")[0]
        choices = " or ".join(getattr(kind, "_value2member_map_", ()))
        hint = f"use a value such as {_EXAMPLES.get(expected, choices)}"
        raise UsageError(f"{place}{at.rstrip('`')}: {message[0].lower()}{message[1:]}", hint=hint) from error


def decode_arguments(kind: type, given: Any) -> Any:
    """Decode vLLM arguments, the only type that msgspec cannot decode itself (`dec_hook` of msgspec)."""
    if kind is Arguments:
        return Arguments(msgspec.convert(given, tuple[str, ...]))
    raise NotImplementedError(f"cannot decode a field of type {kind.__name__}")


def _prefix_place(place: str, message: str) -> str:
    return f"{place}: {message}" if place else message
