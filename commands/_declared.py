"""Options generated from declared settings."""

import inspect
from typing import Annotated, Any

import typer

from coldstart.scheduling.declaration import Setting


def declare(one: Setting, kind: Any, default: object) -> inspect.Parameter:
    """Return the option of a declared setting."""
    option = typer.Option(one.flag, help=one.help, metavar=one.unit)
    return inspect.Parameter(
        one.option, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )
