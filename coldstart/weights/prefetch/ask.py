"""Resolve a model name to a prefetch request: source, weights plan and tensor names.

The plan comes from the bundle, so that a server started from this bundle attaches to the same copy. Without a bundle, the
plan is built from local files, which requires hashing them once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coldstart.artifacts.bundle import TrustCheck
from coldstart.errors import CommandFailedError, UsageError
from coldstart.models import inspection, resolver
from coldstart.models.inspection import BundleLookup
from coldstart.models.resolution import weight_files
from coldstart.system.paths import Cache
from coldstart.weights import weights_plan as weights
from coldstart.weights.prefetch import PrefetchError, client
from coldstart.weights.prefetch.sources import is_local


@dataclass(frozen=True)
class PrefetchRequest:
    """Source and plan for `client.attach`, and the model's name."""

    model: str
    source: str
    plan: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def resolve_request(
    model: str,
    vllm_args: Sequence[str] = (),
    *,
    cache: Cache,
    weights_from: str | None = None,
    offline: bool = False,
    accepts: TrustCheck | None = None,
) -> PrefetchRequest:
    """Look up a model as `serve` does. Its source is `weights_from`, or else the model's directory, or else the hub.

    Raises:
        NoBundleError: Neither a bundle nor local files provide the plan.
        UsageError: The model has no weights here and no hub repository.
        ColdstartError: `resolver.look_up_for_start` failed.
    """
    lookup = resolver.look_up_for_start(model, vllm_args, cache=cache, offline=offline, accepts=accepts)
    source = weights_from or _own_source(lookup)
    return PrefetchRequest(
        lookup.model.name, source, _plan(lookup.accept_nearest_without_weights(), source), lookup.notes
    )


def _own_source(lookup: BundleLookup) -> str:
    model = lookup.model
    if model.weight_files:
        return str(model.path)
    if model.repo_id is not None:
        return f"hf://{model.repo_id}" + (f"@{model.revision}" if model.revision else "")
    raise UsageError(
        f"cannot prefetch {model.name}: its directory has no weights",
        hint="run `coldstart prefetch start MODEL --weights-from SOURCE`",
    )


def _plan(lookup: BundleLookup, source: str) -> Mapping[str, Any]:
    plan = None
    if lookup.bundle is not None and lookup.bundle.has_section("weights"):
        plan = lookup.bundle.read_json("weights")
    if isinstance(plan, Mapping):
        return plan
    local = [Path(source)] if is_local(source) else []
    for directory in (*local, *filter(None, [lookup.model.path])):
        if weight_files(directory):
            return weights.build_plan(directory)
    raise inspection.build_miss_error(lookup)


def fetch_all_files(request: PrefetchRequest) -> dict[str, Any]:
    """Start a prefetcher if none runs, fetch all files, and return the lease's statistics. Raises CommandFailedError."""
    try:
        with client.attach(request.source, request.plan) as attached:
            attached.wait_for_tensors()
            return attached.query_stats()
    except PrefetchError as error:
        raise CommandFailedError(str(error), hint="run `coldstart prefetch status`") from error
