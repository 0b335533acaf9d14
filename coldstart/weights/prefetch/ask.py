"""Resolve a model name to a prefetch request: source and weights plan.

The plan comes from the bundle, so that a server started from this bundle attaches to the same prefetcher. Without a
bundle, the plan is built from local files, which are hashed once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coldstart.artifacts.bundle import TrustCheck
from coldstart.errors import CommandFailedError, UsageError
from coldstart.models import inspection, resolver
from coldstart.models.inspection import Lookup
from coldstart.models.resolution import weight_files
from coldstart.system.paths import Cache
from coldstart.weights import weights_plan as weights
from coldstart.weights.prefetch import client
from coldstart.weights.prefetch.sources import is_local


@dataclass(frozen=True)
class PrefetchRequest:
    """Source and plan for `client.attach`, the model's name, and remarks for the user."""

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
    accepts: TrustCheck | None = None,
) -> PrefetchRequest:
    """Look up the model as `serve` does. Its source is `weights_from`, else its directory, else the hub.

    Raises:
        NoBundleError: Neither a bundle nor local files provide the plan.
        UsageError: The model has no local weights and no hub repository.
        ColdstartError: `resolver.resolve` failed.
    """
    lookup = resolver.resolve(model, vllm_args, cache=cache, offline=offline, accepts=accepts)
    source = weights_from or _choose_source(lookup)
    return PrefetchRequest(lookup.model.name, source, _find_plan(lookup.drop_weights(), source), lookup.notes)


def _choose_source(lookup: Lookup) -> str:
    model = lookup.model
    if model.weight_files:
        return str(model.path)
    if model.repo_id is not None:
        return f"hf://{model.repo_id}" + (f"@{model.revision}" if model.revision else "")
    raise UsageError(
        f"cannot prefetch {model.name}: its directory has no weights",
        hint="coldstart prefetch start MODEL --weights-from SOURCE",
    )


def _find_plan(lookup: Lookup, source: str) -> Mapping[str, Any]:
    plan = (
        lookup.bundle.read_json("weights")
        if lookup.bundle is not None and lookup.bundle.has_section("weights")
        else None
    )
    if isinstance(plan, Mapping):
        return plan
    local = [Path(source)] if is_local(source) else []
    for directory in (*local, *filter(None, [lookup.model.path])):
        if weight_files(directory):
            return weights.build_plan(directory)
    raise inspection.build_miss_error(lookup)


def fetch_all(wanted: PrefetchRequest) -> dict[str, Any]:
    """Start a prefetcher if none runs, fetch all files, and return the statistics. Raises CommandFailedError."""
    try:
        with client.attach(wanted.source, wanted.plan) as attached:
            attached.wait_for_tensors()
            return attached.read_stats()
    except client.PrefetchError as error:
        raise CommandFailedError(str(error), hint="coldstart prefetch status") from error
