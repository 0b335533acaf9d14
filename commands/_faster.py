"""Name what would make the next start of a server faster, and by how much where earlier starts show it."""

import shlex
from collections.abc import Iterable

from coldstart.contract.fallback import Fallback
from coldstart.models.inspection import Lookup
from coldstart.system import secrets

SLOW_S = 3.0
"""Shortest time to ready, in seconds, after which a start is called slow."""
_TAKES_ARGUMENTS = "coldstart materialize "


def advise(
    lookup: Lookup,
    ready_s: float,
    unavailable: Iterable[Fallback],
    source: str | None = None,
) -> str | None:
    """Return the command that prepares the fastest unavailable start mode, in one line; None after a fast start.

    The line contains the expected time of a start in that mode if it is known; `source` is the source of the weights.
    """
    hints = [(one.stage, one.hint) for one in unavailable if one.hint and one.hint.startswith("coldstart ")]
    if ready_s < SLOW_S or not hints:
        return None
    mode, command = hints[0]
    if lookup.vllm_args and command.startswith(_TAKES_ARGUMENTS):
        command += " -- " + shlex.join(secrets.arguments(lookup.vllm_args))
    return f"For a faster next start ({_describe_gain(lookup, mode, ready_s, source)}): {command}"


def _describe_gain(lookup: Lookup, mode: str, ready_s: float, source: str | None) -> str:
    from coldstart.launch import prediction, start_history

    basis, seconds = "the last one here", start_history.find_last(lookup.key.digest, mode, lookup.cache)
    if seconds is None and lookup.bundle is not None:
        predicted = prediction.predict(lookup.bundle, mode, source, lookup.cache)
        basis, seconds = "by the bundle's stages", predicted.ttft_s if predicted else None
    if seconds is None or seconds >= ready_s:
        return mode
    return f"{mode}, {basis}: {seconds:.1f} s instead of {ready_s:.1f} s"
