"""From the model that a user names to what the prefetcher is asked for: a source, a plan, names.

The plan is the bundle's, so that a server started from that bundle meets the same copy; without a bundle it is made of local
files, which hashes them once.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coldstart.artifacts.bundle import Trust
from coldstart.errors import CommandFailedError, UsageError
from coldstart.models import inspection
from coldstart.models.inspection import Lookup
from coldstart.models.resolution import weight_files
from coldstart.system.paths import Cache
from coldstart.weights import weights_plan as weights
from coldstart.weights.prefetch import client, configuration
from coldstart.weights.prefetch.range_source import is_local


@dataclass(frozen=True)
class Wanted:
    """What `client.attach` takes, and the model's name."""

    model: str
    source: str
    plan: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def resolve(
    model: str,
    vllm_args: Sequence[str] = (),
    *,
    cache: Cache,
    weights_from: str | None = None,
    offline: bool = False,
    accepts: Trust | None = None,
) -> Wanted:
    """Look the model up as `serve` does. Its weights come from `weights_from`, else its directory, else the hub.

    Raises what inspection.look_up raises, NoBundleError when neither a bundle nor local files say what the weights are.
    """
    lookup = inspection.look_up(model, vllm_args, cache=cache, offline=offline, accepts=accepts)
    source = weights_from or _own_source(lookup)
    return Wanted(lookup.model.name, source, _plan(lookup.without_weights(), source), lookup.notes)


def _own_source(lookup: Lookup) -> str:
    model = lookup.model
    if model.weight_files:
        return str(model.path)
    if model.repo_id is not None:
        return f"hf://{model.repo_id}" + (f"@{model.revision}" if model.revision else "")
    raise UsageError(
        f"{model.name} has no weights here.",
        hint="say where they are: coldstart prefetch start MODEL --weights-from SOURCE",
    )


def _plan(lookup: Lookup, source: str) -> Mapping[str, Any]:
    plan = (
        lookup.bundle.json("weights") if lookup.bundle is not None and lookup.bundle.has("weights") else None
    )
    if isinstance(plan, Mapping):
        return plan
    local = [Path(source)] if is_local(source) else []
    for directory in (*local, *filter(None, [lookup.model.path])):
        if weight_files(directory):
            return weights.plan(directory)
    raise inspection.miss(lookup)


def fetch_all(
    wanted: Wanted, names: Collection[str] | None, settings: Mapping[str, str], directory: Path | None = None
) -> dict[str, Any]:
    """Start a prefetcher with `settings` if none runs, and have everything fetched that is wanted; the lease's stats.

    Raises UsageError for settings while one runs already or that are no good, CommandFailedError when it cannot be done.
    """
    _settle(settings, directory)
    try:
        with client.attach(wanted.source, wanted.plan, names=names, directory=directory) as attached:
            attached.complete(names)
            return attached.stats()
    except client.PrefetchError as error:
        raise CommandFailedError(str(error), hint="coldstart prefetch status") from error


def _settle(settings: Mapping[str, str], directory: Path | None) -> None:
    try:
        configuration.from_environment({**os.environ, **settings})
    except ValueError as error:
        raise UsageError(f"{error}.") from error
    if settings and running(directory):
        raise UsageError(
            "A prefetcher runs already, with settings of its own.", hint="coldstart prefetch stop"
        )
    os.environ.update(settings)


def running(directory: Path | None = None) -> dict[str, Any] | None:
    """What the prefetcher says of itself, None when there is none."""
    try:
        return client.request("status", directory=directory)
    except client.PrefetchError:
        return None


def stop(directory: Path | None = None) -> int:
    """Stop it and wait for its end; its pid. Raises client.PrefetchLostError when none runs."""
    return int(client.request("stop", directory=directory)["stopped"])
