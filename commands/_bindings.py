"""Connect the options of a command to environment variables and to keys of the configuration file, by the option's name.

The parser derives both from the name of a parameter, which cannot be that of an option such as ``--for``.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from coldstart.commands import config_file

from coldstart.errors import UsageError


def bind_variables(command: Any, prefix: str) -> None:
    """Set the variable PREFIX_OPTION for each option, and PREFIX_SUBCOMMAND_OPTION below a group."""
    for key, option in _list_options(command):
        if key != option.name:
            option.envvar = f"{prefix}_{key}".upper()
    for name, below in _list_subcommands(command).items():
        bind_variables(below, f"{prefix}_{name}".replace("-", "_"))


def bind_table(command: Any, table: Mapping[str, Any], shared: Collection[str], where: str) -> dict[str, Any]:
    """Return the table with names of parameters as keys; `shared` options of a group apply to its subcommands.

    `where` is the name of the table. Raises UsageError for a key that is neither an option nor a subcommand.
    """
    options, below = dict(_list_options(command)), _list_subcommands(command)
    config_file.check(table, {*options, *below, *shared}, f"[{where}] of the configuration")
    own = {options[key].name: value for key, value in table.items() if key in options}
    for_all = {key: value for key, value in table.items() if key in shared}
    for name, subcommand in below.items():
        inner = table.get(name, {})
        if not isinstance(inner, Mapping):
            raise UsageError(
                f"{where}.{name} of the configuration is {inner!r}: expected a table",
                hint=f"write [{where}.{name}] above its options",
            )
        own[name] = bind_table(subcommand, {**for_all, **inner}, shared, f"{where}.{name}")
    return own


def _list_options(command: Any) -> Iterator[tuple[str, Any]]:
    """Yield each option or argument by its key: the name of the longest flag with _ for -."""
    for option in command.params:
        flag = max(option.opts, key=len).lstrip("-")
        yield flag.replace("-", "_"), option


def _list_subcommands(command: Any) -> Mapping[str, Any]:
    return getattr(command, "commands", {})
