"""Options for keys: a command with `api_key` or `admin_key` also has an option for a file that contains the key."""

import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from coldstart.commands._output import Output

from coldstart.errors import UsageError
from coldstart.system.secrets import describe_exposure, read_key

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
            f"{_flag(name)} is empty", hint=f"{_flag(name)}-file FILE, or unset {variable} for no key"
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
