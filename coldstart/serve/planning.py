"""Resolve a request to a launch plan. Nothing is started here; `ladder` does that.

Compatibility is decided from the manifest before anything heavy is imported. Each part of the bundle that the plan
does not use has a Fallback with the reason.
"""

from __future__ import annotations

from dataclasses import replace

from coldstart.artifacts.net.origin import without_secrets
from coldstart.contract.fallback import Fallback
from coldstart.contract.plan import LaunchPlan
from coldstart.key import inspection
from coldstart.machine import addresses, runtime
from coldstart.model import models
from coldstart.serve import fetch, prepare, scheduler, unserved
from coldstart.serve.request import ServeRequest

DEFAULT_PORT = 8000


def plan(request: ServeRequest) -> LaunchPlan:
    """The plan of the start that was asked for, its scheduler checked. Raises NoBundle where one is needed."""
    lookup = request.lookup
    signed_by = request.trust if request.require_signature else None
    inspection.require(lookup, bundle=not request.without_bundle, signed_by=signed_by)
    launch_plan = _prepared(request)
    return scheduler.apply(launch_plan, request.scheduler, lookup.bundle, on_cpu=runtime.targets_cpu())


def _prepared(request: ServeRequest) -> LaunchPlan:
    lookup, donor = request.lookup, request.lookup.weights_donor
    streamed = None
    if donor and request.weights_from:
        streamed = fetch.Streamed.of(donor, request.weights_from, request.weights_pace)
    ensure = models.ensure_weights if streamed is None else models.ensure_tokenizer
    lookup = replace(lookup, model=ensure(lookup.model, offline=lookup.offline))
    if lookup.bundle is None:
        launch_plan = prepare.ordinary(lookup, request.listen, streamed)
    else:
        launch_plan = prepare.prepare(
            lookup, lookup.bundle, request.listen, trust=request.trust, streamed=streamed
        )
    launch_plan.fallbacks.extend(unserved.fallbacks(launch_plan.vllm_args))
    if request.weights_from is not None and streamed is None:
        reason = f"no bundle says what {without_secrets(request.weights_from)} must hold: the model's own directory is read"
        launch_plan = replace(launch_plan, fallbacks=[*launch_plan.fallbacks, Fallback("weights", reason)])
    return launch_plan


def url(plan: LaunchPlan) -> str:
    """Where the planned server will answer."""
    given = plan.vllm_args
    if uds := given.value("uds"):
        return f"unix:{uds}"
    host = str(given.value("host") or "127.0.0.1")
    scheme = "https" if given.value("ssl_certfile") else "http"
    return addresses.url(host, given.value("port", DEFAULT_PORT), scheme)
