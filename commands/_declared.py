"""Options generated from the parameters of a function and from declared settings."""

import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from coldstart.scheduling.declaration import Setting


def list_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function with resolved annotations, by keyword only."""
    hints = get_type_hints(function, include_extras=True)
    return [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
        for name, parameter in inspect.signature(function).parameters.items()
    ]


def declare_settings(
    default: object, settings: Iterable[tuple[str, "Setting"]], **shown: object
) -> list[inspect.Parameter]:
    """Return the options of declared settings, with the values of `default`, or those of `shown` by field name."""
    types = get_type_hints(type(default))
    return [
        inspect.Parameter(
            one.option,
            inspect.Parameter.KEYWORD_ONLY,
            default=shown.get(name, getattr(default, name)),
            annotation=Annotated[types[name], typer.Option(one.flag, help=one.help, metavar=one.unit)],
        )
        for name, one in settings
    ]
