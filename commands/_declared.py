"""Generate command-line options from function parameters and declared settings, and read the files of keys."""

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
    """Return the parameters of a function as keyword-only parameters with resolved annotations."""
    hints = get_type_hints(function, include_extras=True)
    return [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
        for name, parameter in inspect.signature(function).parameters.items()
    ]


def declare_settings(
    default: Any, settings: Iterable[tuple[str, Setting]], **overrides: object
) -> list[inspect.Parameter]:
    """Return the command-line options of declared settings.

    Args:
        default: Dataclass instance with the default values. If it is the dataclass itself, an option is None unless it is
            typed, so that a file or the default of the field can apply.
        settings: Names of the fields with their declarations.
        overrides: Default values by field name that replace those of `default`. A list makes its option repeatable.
    """
    is_optional = isinstance(default, type)
    types = get_type_hints(default if is_optional else type(default))
    defaults = {
        field.name: field.default if is_optional else getattr(default, field.name)
        for field in fields(default)
    }

    def declare(name: str, setting: Setting) -> inspect.Parameter:
        value, text = overrides.get(name, defaults[name]), setting.help
        kind: Any = _find_type(types[name], setting)
        if is_optional:
            is_size = setting.metavar == "SIZE"
            text += "" if value in (MISSING, None) or is_size else f" Default: {value}."
            kind, value = (str if is_size else types[name]) | None, None
        elif isinstance(value, list):
            kind, text = list[kind], f"{text} Repeatable."
        annotation = Annotated[kind, typer.Option(setting.flag, help=text, metavar=setting.metavar)]
        return inspect.Parameter(
            setting.option,
            inspect.Parameter.KEYWORD_ONLY,
            # An empty tuple is the default of a repeatable option.
            default=None if value == () else value,
            annotation=annotation,
        )

    return [declare(name, setting) for name, setting in settings if setting.flag]


def _find_type(kind: Any, setting: Setting) -> Any:
    if setting.metavar == "FILE":
        return Path | None
    return list[str] | None if get_origin(kind) is tuple else kind


def take_settings(kind: object, option_values: dict[str, Any]) -> dict[str, Any]:
    """Move the settings of a dataclass out of `option_values`, and return those that have a value, by field name."""
    settings = list_settings(kind)
    values = ((name, option_values.pop(setting.option)) for name, setting in settings if setting.flag)
    return {name: value for name, value in values if value is not None}


KEYS = ("api_key", "admin_key")


def add_file_options(options: Sequence[inspect.Parameter]) -> list[inspect.Parameter]:
    """Return `options` with an additional option KEY_file after each option that takes a key."""
    result: list[inspect.Parameter] = []
    for option in options:
        result.append(option)
        if option.name in KEYS:
            result.append(_declare_file(option.name))
    return result


def resolve_keys(ctx: typer.Context, option_values: dict[str, Any], out: Output) -> None:
    """Replace each key file in `option_values` with the key that it contains, and warn about keys that other users can see.

    Raises:
        UsageError: A key and its file are both on the command line, the key is empty, or its file contains no key.
    """
    for name in KEYS:
        if name not in option_values:
            continue
        variable = f"{ctx.auto_envvar_prefix}_{name.upper()}"
        file = option_values.pop(f"{name}_file")
        typed = is_typed(ctx, name)
        if typed and is_typed(ctx, f"{name}_file"):
            raise UsageError(f"{_flag(name)} and {_flag(name)}-file are both set", hint="remove one of them")
        if typed and option_values[name] is not None:
            out.warn(
                f"{_flag(name)} shows the key in the process list; use {_flag(name)}-file FILE or set {variable}"
            )
        elif file is not None:
            option_values[name] = read_key(file)
            if (warning := describe_exposure(file)) is not None:
                out.warn(warning)
        _require_nonempty(name, option_values[name], variable)


def _require_nonempty(name: str, key: str | None, variable: str) -> None:
    """Raise UsageError for an empty key or variable, because a server would then not require a key."""
    if (key is None and os.environ.get(variable) == "") or (key is not None and not key.strip()):
        raise UsageError(
            f"{_flag(name)} is empty", hint=f"use {_flag(name)}-file FILE, or unset {variable} to use no key"
        )


def _declare_file(name: str) -> inspect.Parameter:
    annotation = Annotated[
        Path | None,
        typer.Option(
            f"{_flag(name)}-file",
            metavar="FILE",
            help=f"File that contains the key, for use instead of {_flag(name)}.",
        ),
    ]
    return inspect.Parameter(
        f"{name}_file", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def is_typed(ctx: typer.Context, name: str) -> bool:
    """Return whether the user set the option on the command line rather than in the environment."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
