"""Settings from the configuration file. Precedence: option, environment (COLDSTART_<COMMAND>_<OPTION>), file, default.

The file is TOML: one table per command with its options as keys, and the common options at the top::

    format = "json"
    [serve]
    port = 8000
"""

import difflib
import itertools
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from coldstart.artifacts import files

from coldstart.contract import environment
from coldstart.errors import UsageError, describe
from coldstart.system import paths

PREFIX = environment.PREFIX


class Defaults(dict[str, dict[str, Any]]):
    """Defaults of options by command, and the `file` that sets them."""

    file: Path | None = None


def locate(argv: Sequence[str]) -> Path | None:
    """Return the configuration file: ``--config`` in ``argv``, else COLDSTART_CONFIG, else the user's file, else None.

    Raises UsageError if a named file does not exist.
    """
    named = _flag(argv) or environment.CONFIG.read()
    try:
        path = paths.expand(named) if named else paths.config_file()
    except UsageError:  # without a home directory there is no such file
        return None
    if path.is_file():
        return path
    if named:
        why = "is not a regular file" if path.exists() else "does not exist"
        raise UsageError(f"The configuration file {path} {why}.", hint="name another: --config FILE")
    return None


def load(argv: Sequence[str], commands: Collection[str], shared: Collection[str]) -> Defaults:
    """Return the defaults per command from the file that ``locate`` finds; none without a file.

    ``shared`` are the options that are allowed at the top. Raises UsageError for invalid TOML and unknown names.
    """
    path = locate(argv)
    if path is None:
        return Defaults()
    document = {_plain(name): value for name, value in _read(path).items()}
    common = {name: value for name, value in document.items() if not isinstance(value, Mapping)}
    tables = {name.replace("_", "-"): v for name, v in document.items() if isinstance(v, Mapping)}
    check(common, shared, str(path))
    check(tables, commands, str(path))
    found = Defaults({name: {**common, **_plain_names(tables.get(name, {}))} for name in commands})
    found.file = path
    return found


def check(names: Collection[str], known: Collection[str], where: str) -> None:
    """Raise UsageError for the first of ``names`` that is not in ``known``, with the most similar known name."""
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known settings: {', '.join(sorted(known))}"
            raise UsageError(f"unknown setting {name!r} in {where}.", hint=hint)


def find_format(argv: Sequence[str], defaults: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return the output format that `argv`, the environment or `defaults` set, also if the parser rejects `argv`."""
    typed = [following for word, following in itertools.pairwise(argv) if word == "--format"]
    typed += [word.partition("=")[2] for word in argv if word.startswith("--format=")]
    if typed:
        return typed[-1]
    command = [word for word in argv if not word.startswith("-")][:2]
    prefixes = ["_".join([PREFIX, *command[:count]]) for count in range(1, len(command) + 1)]
    variables = [f"{prefix}_format".upper().replace("-", "_") for prefix in prefixes]
    table: Any = defaults
    found = None
    for word in command:
        table = table.get(word)
        if not isinstance(table, Mapping):
            break
        found = table.get("format", found)
    return next((os.environ[name] for name in variables if os.environ.get(name)), found)


def _flag(argv: Sequence[str]) -> str | None:
    for index, token in enumerate(argv):
        if token.startswith("--config="):
            return token.partition("=")[2]
        if token == "--config" and index + 1 < len(argv):
            return argv[index + 1]
    return None


def _read(path: Path) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(files.read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} cannot be read: {describe(error)}.",
            hint="write TOML, such as [serve] and below it port = 8000, or name another: --config FILE",
        ) from error


def _plain_names(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        _plain(name): _plain_names(value) if isinstance(value, Mapping) else value
        for name, value in table.items()
    }


def _plain(name: str) -> str:
    return name.replace("-", "_")
