"""Resolve a request to a launch plan. This module does not start processes; `ladder` does.

Compatibility is decided from the manifest before anything heavy is imported. Each part of the bundle that the plan
does not use has a Fallback with the reason.
"""

from __future__ import annotations

from coldstart.contract.plan import LaunchPlan
from coldstart.launch import fetch, listening, prepare, scheduler, unserved
from coldstart.launch.request import ServeRequest
from coldstart.models import inspection, resolution
from coldstart.system import runtime


def plan(request: ServeRequest) -> LaunchPlan:
    """Return the launch plan of a request, including its scheduler, whose settings must have been checked.

    Raises:
        NoBundleError: No bundle was found and the request needs one.
        CommandFailedError: The bundle has no required signature or no weights plan.
        UsageError: The weight files of the model cannot be loaded.
    """
    lookup = request.lookup
    if request.weights_from is None and lookup.model.repo_id is None:
        resolution.check_weights(
            lookup.model
        )  # before a missing bundle is reported, which could not be built either
    signed_by = request.trust if request.require_signature else None
    missing = inspection.require(lookup, bundle=not request.without_bundle, signed_by=signed_by)
    weights = fetch.choose(lookup, request.weights_from, request.weights_pace, request.listen)
    if lookup.bundle is None:
        planned = prepare.ordinary(lookup, weights, missing)
    else:
        planned = prepare.prepare(lookup, lookup.bundle, weights, trust=request.trust)
    planned.fallbacks.extend([*unserved.fallbacks(planned.vllm_args), *weights.fallbacks])
    return scheduler.apply(planned, request.scheduler, lookup.bundle, on_cpu=runtime.targets_cpu())


def url(plan: LaunchPlan) -> str:
    """Return the URL on which the planned server will answer."""
    return listening.find_url(plan.vllm_args)
