"""Name the commands that stop what `coldstart up` started, and what each costs: the time of the next start, or memory."""

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coldstart.commands._output import human_bytes

if TYPE_CHECKING:
    from coldstart.launch.preparation import Preparation
    from coldstart.models.inspection import Lookup


@dataclass(frozen=True)
class StopCosts:
    """Seconds of the next `up` with the template, of the template's build, and the bytes of the server and its template.

    None for what is not known: the first start from a new template takes longer than later ones. So does the first
    preparation, which fills caches: with `was_first` it is the only known time.
    """

    has_template: bool = False
    kept_s: float | None = None
    built_s: float | None = None
    freed_bytes: int | None = None
    was_first: bool = False


def describe(argument: str, costs: StopCosts, *, detached: bool) -> str:
    """Return how to stop the server of the model that `argument` names, in one line."""
    down = shlex.join(["coldstart", "down", argument])
    if not costs.has_template:
        return (
            f"Stop it: {down}"
            if detached
            else "Stop it: Ctrl-C; with --detach the server runs in the background"
        )
    kept, anew = "the next up needs no preparation", "the next up takes longer"
    if costs.kept_s is not None:
        kept = f"the next up takes about {costs.kept_s:.1f} s"
    if costs.built_s is not None:
        anew = f"the next up prepares again, in about {costs.built_s:.0f} s"
        if costs.was_first:
            anew = f"the next up prepares again, which took {costs.built_s:.0f} s the first time"
    freed = f"frees {human_bytes(costs.freed_bytes)}; " if costs.freed_bytes else ""
    last = f"{down} ({freed}{anew})"
    if detached:
        return f"Stop it: {down} --keep-template ({kept}), or {last}"
    return f"Stop it: Ctrl-C, which keeps the template ({kept}); then, without the template: {last}"


def record_preparation(lookup: "Lookup", prepared: "Preparation") -> None:
    """Store the time of a new preparation, before the server starts, which stores its own time in the same file."""
    from coldstart.launch import start_history

    key, cache = lookup.key.digest, lookup.cache
    if prepared.is_new:
        was_first = start_history.find_last(key, _name(prepared, first=True), cache) is None
        start_history.record_start(key, _name(prepared, first=was_first), prepared.seconds, cache)


def _name(prepared: "Preparation", *, first: bool) -> str:
    return f"{'first ' if first else ''}preparation of {prepared.mode}"


def find_costs(lookup: "Lookup", prepared: "Preparation", others_s: float, server: int) -> StopCosts:
    """Return the costs after a start that took `others_s` seconds besides the preparation; `server` is its PID."""
    from coldstart.launch import preparation, start_history
    from coldstart.system.proc import processes

    warm = preparation.find_template(lookup, prepared)
    if warm is None or warm.pid is None:
        return StopCosts()
    first_s, last_s = (
        start_history.find_last(lookup.key.digest, _name(prepared, first=first), lookup.cache)
        for first in (True, False)
    )
    try:
        freed = processes.pss_bytes({warm.pid, *processes.tree(server)})
    except ProcessLookupError:  # it has just ended
        freed = None
    kept_s, built_s = None if prepared.is_new else others_s, first_s if last_s is None else last_s
    return StopCosts(True, kept_s, built_s, freed, last_s is None and first_s is not None)
