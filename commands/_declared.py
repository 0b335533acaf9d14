"""Options generated from the parameters of a function and from declared settings, with their environment variables."""

import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

import typer
from coldstart.commands._output import Output

from coldstart.errors import UsageError
from coldstart.scheduling.declaration import Setting, list_settings
from coldstart.system.secrets import describe_exposure, read_key


def list_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function with resolved annotations, by keyword only."""
    hints = get_type_hints(function, include_extras=True)
    return [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
        for name, parameter in inspect.signature(function).parameters.items()
    ]


def declare_settings(
    default: Any, settings: Iterable[tuple[str, Setting]], **shown: object
) -> list[inspect.Parameter]:
    """Return the options of declared settings, with the values of `default`, or those of `shown` by field name.

    If `default` is a dataclass, its options have no value: without one, a file or the field's default counts. An option whose
    value in `shown` is a list is repeatable.
    """
    is_optional = isinstance(default, type)
    types = get_type_hints(default if is_optional else type(default))
    own = {one.name: one.default if is_optional else getattr(default, one.name) for one in fields(default)}

    def declare(name: str, one: Setting) -> inspect.Parameter:
        value, about = shown.get(name, own[name]), one.help
        kind: Any = _find_type(types[name], one)
        if is_optional:
            about += "" if value in (MISSING, None) else f" Default: {value}."
            kind, value = (str if one.unit == "SIZE" else types[name]) | None, None
        elif isinstance(value, list):
            kind, about = list[kind], f"{about} Repeatable."
        annotation = Annotated[kind, typer.Option(one.flag, help=about, metavar=one.unit)]
        return inspect.Parameter(
            one.option,
            inspect.Parameter.KEYWORD_ONLY,
            # An empty tuple is the default of an option that can be repeated.
            default=None if value == () else value,
            annotation=annotation,
        )

    return [declare(name, one) for name, one in settings if one.flag]


def _find_type(kind: Any, one: Setting) -> Any:
    """Return the type of an option for a field of this type."""
    if one.unit == "FILE":
        return Path | None
    return list[str] | None if get_origin(kind) is tuple else kind


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


KEYS = ("api_key", "admin_key")


def add_file_options(options: Sequence[inspect.Parameter]) -> list[inspect.Parameter]:
    """Return `options` with a file option after each option for a key."""
    added: list[inspect.Parameter] = []
    for option in options:
        added.append(option)
        if option.name in KEYS:
            added.append(_declare_file(option.name))
    return added


def resolve(ctx: typer.Context, given: dict[str, Any], out: Output) -> None:
    """Replace each key in `given` by the content of its file, and warn about a key that others can see.

    Raises:
        UsageError: a key and its file are both on the command line, or the key is empty, or its file holds none.
    """
    for name in KEYS:
        if name not in given:
            continue
        variable = f"{ctx.auto_envvar_prefix}_{name.upper()}"
        file = given.pop(f"{name}_file")
        typed = is_typed(ctx, name)
        if typed and is_typed(ctx, f"{name}_file"):
            raise UsageError(f"{_flag(name)} and {_flag(name)}-file are both set", hint="remove one of them")
        if typed and given[name] is not None:
            out.warn(
                f"{_flag(name)} shows the key in the list of processes; use {_flag(name)}-file FILE or {variable}"
            )
        elif file is not None:
            given[name] = read_key(file)
            if (warning := describe_exposure(file)) is not None:
                out.warn(warning)
        _require_content(name, given[name], variable)


def _require_content(name: str, key: str | None, variable: str) -> None:
    """Raise UsageError for an empty key, which a server would take for none. An empty variable is an empty key."""
    if (key is None and os.environ.get(variable) == "") or (key is not None and not key.strip()):
        raise UsageError(
            f"{_flag(name)} is empty", hint=f"{_flag(name)}-file FILE, or unset {variable} to use no key"
        )


def _declare_file(name: str) -> inspect.Parameter:
    annotation = Annotated[
        Path | None,
        typer.Option(
            f"{_flag(name)}-file",
            metavar="FILE",
            help=f"File that contains the key, instead of {_flag(name)}.",
        ),
    ]
    return inspect.Parameter(
        f"{name}_file", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def is_typed(ctx: typer.Context, name: str) -> bool:
    """Return whether the option is on the command line, not in the environment."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
