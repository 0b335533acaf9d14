"""Connect the options of a command to environment variables and to keys of the configuration file, by the option's name.

The parser derives both from the name of a parameter, which cannot be that of an option such as ``--for``.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import typer
from coldstart.commands import config_file

from coldstart.errors import UsageError


def bind_variables(command: Any, prefix: str) -> None:
    """Set the variable PREFIX_OPTION for each option, and PREFIX_SUBCOMMAND_OPTION below a group."""
    for key, option in _list_options(command):
        if key != option.name:
            option.envvar = f"{prefix}_{key}".upper()
    for name, below in _list_subcommands(command).items():
        bind_variables(below, f"{prefix}_{name}".replace("-", "_"))


def bind_table(
    command: Any, table: Mapping[str, Any], shared: Collection[str], where: str, file: object
) -> dict[str, Any]:
    """Return the table with names of parameters as keys; `shared` options of a group apply to its subcommands.

    `where` is the name of the table in `file`. Raises UsageError for a key that is neither an option nor a subcommand.
    """
    options, below = dict(_list_options(command)), _list_subcommands(command)
    known = {*options, *below, *shared}
    for key in (key for key in table if key not in known):
        if place := next((name for name, one in below.items() if key in dict(_list_options(one))), None):
            raise UsageError(
                f"unknown setting {key!r} in [{where}] of {file}.", hint=f"write it in [{where}.{place}]"
            )
    config_file.check(table, known, f"[{where}] of {file}")
    own = {options[key].name: value for key, value in table.items() if key in options}
    for_all = {key: value for key, value in table.items() if key in shared}
    for name, subcommand in below.items():
        inner = table.get(name, {})
        if not isinstance(inner, Mapping):
            raise UsageError(
                f"{where}.{name} of {file} is {inner!r}: expected a table",
                hint=f"write [{where}.{name}] above its options",
            )
        own[name] = bind_table(subcommand, {**for_all, **inner}, shared, f"{where}.{name}", file)
    return own


def check_values(command: Any, bound: Mapping[str, Any], where: str, file: object) -> None:
    """Raise UsageError for a value of a bound table that its option does not accept.

    The parser's own error would not name the file.
    """
    for key, option in _list_options(command):
        if option.name not in bound:
            continue
        try:
            option.type_cast_value(typer.Context(command), bound[option.name])
        except Exception as error:
            # The class is private to typer.
            if not hasattr(error, "format_message"):
                raise
            place = f"{key} in [{where}] of {file}"
            raise UsageError(
                f"{place}: {getattr(error, 'message', error)}", hint="correct the value in the file"
            ) from error
    for name, below in _list_subcommands(command).items():
        check_values(below, bound[name], f"{where}.{name}", file)


def _list_options(command: Any) -> Iterator[tuple[str, Any]]:
    """Yield each option or argument by its key: the name of the longest flag with _ for -."""
    for option in command.params:
        flag = max(option.opts, key=len).lstrip("-")
        yield flag.replace("-", "_"), option


def _list_subcommands(command: Any) -> Mapping[str, Any]:
    return getattr(command, "commands", {})
