"""Resolve a request to a launch plan. This module does not start processes; `ladder` does.

Compatibility is decided from the manifest before anything heavy is imported. Each part of the bundle that the plan
does not use has a Fallback with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from coldstart.contract.arguments import Arguments
from coldstart.contract.fallback import Fallback
from coldstart.contract.plan import LaunchPlan
from coldstart.launch import fetch, listening, prepare, scheduler
from coldstart.launch.request import ServeRequest
from coldstart.models import inspection, resolution
from coldstart.system import runtime

# Flags that only the command `vllm serve` acts on. Servers here parse and ignore them: one process serves the API over HTTP.
_ONE = "coldstart serves the API with one process"
_HTTP = "coldstart serves the API over HTTP only"
_SUPERVISOR = (
    "only the supervisor of --data-parallel-multi-port-external-lb reads it, which does not run here"
)
UNSERVED: Mapping[str, str] = {
    "api_server_count": _ONE,
    "grpc": _HTTP,
    "grpc_port": _HTTP,
    "data_parallel_supervisor_port": _SUPERVISOR,
    "dp_supervisor_probe_interval_s": _SUPERVISOR,
    "dp_supervisor_probe_timeout_s": _SUPERVISOR,
    "dp_supervisor_probe_failure_threshold": _SUPERVISOR,
}

# Values that ask for the default: no value, or one server.
_AS_IT_IS = ((None, False), (None, 0, 1))


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
    if request.defer_capture:
        planned = _defer_capture(planned)
    planned.fallbacks.extend([*list_unserved(planned.vllm_args), *weights.fallbacks])
    return scheduler.apply(planned, request.scheduler, lookup.bundle, on_cpu=runtime.targets_cpu())


def _defer_capture(plan: LaunchPlan) -> LaunchPlan:
    if runtime.targets_cpu() or plan.engine.restore is not None:
        here = "the bundle's graphs are restored" if plan.engine.restore else "the CPU has no CUDA graphs"
        plan.fallbacks.append(Fallback("graphs", f"--capture deferred has no effect: {here}."))
        return plan
    return replace(plan, engine=replace(plan.engine, deferred=True))


def url(plan: LaunchPlan) -> str:
    """Return the URL on which the planned server will answer."""
    return listening.find_url(plan.vllm_args)


def list_unserved(given: Arguments) -> list[Fallback]:
    """Return a fallback for each flag in `given` that has no effect."""
    return [
        Fallback("server", f"--{name.replace('_', '-')} has no effect: {reason}.")
        for name, reason in UNSERVED.items()
        if given.value(name) not in _AS_IT_IS[name == "api_server_count"]
    ]
