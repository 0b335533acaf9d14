"""Options generated from the parameters of a function and from declared settings, with their environment variables."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

import typer

from coldstart.scheduling.declaration import Setting, list_settings


def list_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function with resolved annotations, by keyword only."""
    hints = get_type_hints(function, include_extras=True)
    return [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
        for name, parameter in inspect.signature(function).parameters.items()
    ]


def declare_settings(
    default: object, settings: Iterable[tuple[str, Setting]], **shown: object
) -> list[inspect.Parameter]:
    """Return the options of declared settings, with the values of `default`, or those of `shown` by field name."""
    types = get_type_hints(type(default))
    return [
        inspect.Parameter(
            one.option,
            inspect.Parameter.KEYWORD_ONLY,
            # An empty tuple is the default of an option that can be repeated.
            default=None if (value := shown.get(name, getattr(default, name))) == () else value,
            annotation=Annotated[
                _find_type(types[name], one), typer.Option(one.flag, help=one.help, metavar=one.unit)
            ],
        )
        for name, one in settings
        if one.flag
    ]


def _find_type(kind: Any, one: Setting) -> Any:
    """Return the type of an option for a field of this type."""
    if one.unit == "FILE":
        return Path | None
    return list[str] | None if get_origin(kind) is tuple else kind


def declare_optional(kind: type) -> list[inspect.Parameter]:
    """Return the options of a dataclass with declared settings; without an option, a file or the field's default counts."""
    types, defaults = get_type_hints(kind), {one.name: one.default for one in fields(kind)}

    def declare(name: str, one: Setting) -> inspect.Parameter:
        shown = "" if defaults[name] in (MISSING, None) else f" Default: {defaults[name]}."
        about = one.help + shown
        value: Any = str if one.unit == "SIZE" else types[name]
        annotation = Annotated[value | None, typer.Option(one.flag, help=about, metavar=one.unit)]
        return inspect.Parameter(
            one.option, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
        )

    return [declare(name, one) for name, one in list_settings(kind) if one.flag]


def take_settings(kind: object, given: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of a dataclass with declared settings from `given`; return those that have a value, by field."""
    named = ((name, given.pop(one.option)) for name, one in list_settings(kind) if one.flag)
    return {name: value for name, value in named if value is not None}


def bind_variables(command: Any, prefix: str) -> None:
    """Set the variable PREFIX_OPTION for each option, and PREFIX_SUBCOMMAND_OPTION below a group.

    The parser derives it from the name of a parameter, which cannot be that of an option such as ``--for``.
    """
    for option in command.params:
        key = max(option.opts, key=len).lstrip("-").replace("-", "_")
        if key != option.name:
            option.envvar = f"{prefix}_{key}".upper()
    for name, below in getattr(command, "commands", {}).items():
        bind_variables(below, f"{prefix}_{name}".replace("-", "_"))
