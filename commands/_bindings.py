"""Connect the options of a command to environment variables, by the option's name.

The parser derives them from the name of a parameter, which cannot be that of an option such as ``--for``.
"""

from collections.abc import Iterator, Mapping
from typing import Any


def bind_variables(command: Any, prefix: str) -> None:
    """Set the variable PREFIX_OPTION for each option, and PREFIX_SUBCOMMAND_OPTION below a group."""
    for key, option in _list_options(command):
        if key != option.name:
            option.envvar = f"{prefix}_{key}".upper()
    for name, below in _list_subcommands(command).items():
        bind_variables(below, f"{prefix}_{name}".replace("-", "_"))


def _list_options(command: Any) -> Iterator[tuple[str, Any]]:
    """Yield each option or argument by its key: the name of the longest flag with _ for -."""
    for option in command.params:
        flag = max(option.opts, key=len).lstrip("-")
        yield flag.replace("-", "_"), option


def _list_subcommands(command: Any) -> Mapping[str, Any]:
    return getattr(command, "commands", {})
