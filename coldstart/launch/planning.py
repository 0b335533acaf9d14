"""Resolve a request to a launch plan. Nothing is started here; `ladder` does that.

Compatibility is decided from the manifest before anything heavy is imported. Each part of the bundle that the plan
does not use has a Fallback with the reason.
"""

from __future__ import annotations

from coldstart.contract.plan import LaunchPlan
from coldstart.launch import fetch, prepare, scheduler, unserved
from coldstart.launch.request import ServeRequest
from coldstart.models import inspection
from coldstart.system import runtime
from coldstart.system.ipc import addresses

DEFAULT_PORT = 8000


def plan(request: ServeRequest) -> LaunchPlan:
    """Return the plan of the requested start, whose scheduler was checked.

    Raises NoBundleError where a bundle is needed, CommandFailedError where it is not signed or names no weights to fetch.
    """
    lookup = request.lookup
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
    """Where the planned server will answer."""
    given = plan.vllm_args
    if uds := given.value("uds"):
        return f"unix:{uds}"
    host = str(given.value("host") or "127.0.0.1")
    scheme = "https" if given.value("ssl_certfile") else "http"
    return addresses.url(host, given.value("port", DEFAULT_PORT), scheme)
