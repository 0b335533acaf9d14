"""Name what would make the next start of a server faster."""

import shlex
from collections.abc import Iterable

from coldstart.contract.fallback import Fallback
from coldstart.models.inspection import Lookup
from coldstart.system import secrets

SLOW_S = 3.0
"""Shortest time to ready, in seconds, after which a start is called slow."""
_TAKE_ARGUMENTS = ("coldstart template start ", "coldstart materialize ")


def advise(lookup: Lookup, ready_s: float, unavailable: Iterable[Fallback]) -> str | None:
    """Return the command that prepares the fastest unavailable start mode, in one line; None after a fast start."""
    hints = [(one.stage, one.hint) for one in unavailable if one.hint and one.hint.startswith("coldstart ")]
    if ready_s < SLOW_S or not hints:
        return None
    mode, hint = hints[0]
    command = hint.replace("MODEL", lookup.model.argument)
    if lookup.vllm_args and command.startswith(_TAKE_ARGUMENTS):
        command += " -- " + shlex.join(secrets.arguments(lookup.vllm_args))
    return f"For a faster next start ({mode}): {command}"
