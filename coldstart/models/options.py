"""Check the names of vLLM's options before a key is computed, against the installed vLLM's sources; vLLM is not imported.

A key of misspelt arguments would miss every bundle. vLLM's own parser checks the values at the start.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import re
from pathlib import Path

from coldstart.contract.arguments import SHORT, Arguments
from coldstart.errors import UsageError
from coldstart.system import runtime

# vLLM's engine options are literals; those of its API server are the fields of a class.
_ENGINE = "engine/arg_utils.py"
_SERVER = ("entrypoints/launchers/cli_args.py", "entrypoints/common/cli_args.py")  # moved by vLLM 0.33
_LITERAL = re.compile(r'"--([a-z][\w-]*)"')
_FIELD = re.compile(r"^    (\w+):", re.MULTILINE)
_OPTION = re.compile(r"--([A-Za-z][\w-]*)")


def check(given: Arguments) -> None:
    """Raise UsageError for an option that the installed vLLM does not have. Do nothing if its sources are not found.

    As in vLLM, an option may be abbreviated, has dashes or underscores, and a plugin may add options.
    """
    known = list_options()
    for word in given if known else ():
        match = _OPTION.match(word)
        name = match[1].replace("_", "-").lower() if match else ""
        if match and not _is_known(name, known) and not runtime.mentions("vllm", f'"--{name}"'):
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.75)
            raise UsageError(
                f"the installed vLLM has no option {match[0]}",
                hint=f"did you mean {', '.join(f'--{one}' for one in near)}?"
                if near
                else "vLLM lists its options: vllm serve --help=all",
            )


def _is_known(name: str, known: frozenset[str]) -> bool:
    plain = name.removeprefix("no-")
    return name in known or plain in known or any(option.startswith(name) for option in known)


@functools.cache
def list_options() -> frozenset[str]:
    """Return the long options of the installed vLLM without dashes in front; empty if its sources are not found."""
    engine, server = _read_sources()
    if not engine:
        return frozenset()
    fields = {name.replace("_", "-") for name in _FIELD.findall(server)}
    return frozenset(
        {*_LITERAL.findall(engine + server), *fields, *(name.replace("_", "-") for name in SHORT.values())}
    )


def _read_sources() -> tuple[str, str]:
    """Return the source texts of the engine's options and of the server's, empty if they are not found."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return "", ""
    root = Path(spec.origin).parent
    place = next((name for name in _SERVER if (root / name).is_file()), _SERVER[0])
    try:
        engine, server = ((root / name).read_text(encoding="utf-8") for name in (_ENGINE, place))
    except OSError:
        return "", ""
    return engine, server
