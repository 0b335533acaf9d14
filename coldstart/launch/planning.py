"""Request to start a server, and its launch plan. This module does not start processes; `ladder` does.

Compatibility is decided from the bundle's manifest, before torch or vLLM is imported. For each section that the plan does
not use, a Fallback gives the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from coldstart.artifacts.bundle import TrustCheck
from coldstart.contract.arguments import Arguments
from coldstart.contract.fallback import Fallback
from coldstart.contract.plan import LaunchPlan
from coldstart.contract.weights import LimitedFetch
from coldstart.launch import fetch, prepare, scheduler
from coldstart.launch.scheduler import STOCK
from coldstart.models import inspection, resolution
from coldstart.models.inspection import BundleLookup
from coldstart.scheduling.settings import SchedulerSettings
from coldstart.system import runtime, start_progress

# Flags that only the command `vllm serve` implements. coldstart's servers accept them, but they have no effect.
_ONE = "coldstart serves the API with one process"
_HTTP = "coldstart serves the API only over HTTP"
_SUPERVISOR = (
    "only the supervisor of --data-parallel-multi-port-external-lb reads it, and coldstart does not run one"
)
INEFFECTIVE_FLAGS: Mapping[str, str] = {
    "api_server_count": _ONE,
    "grpc": _HTTP,
    "grpc_port": _HTTP,
    "data_parallel_supervisor_port": _SUPERVISOR,
    "dp_supervisor_probe_interval_s": _SUPERVISOR,
    "dp_supervisor_probe_timeout_s": _SUPERVISOR,
    "dp_supervisor_probe_failure_threshold": _SUPERVISOR,
}

# Values that select the default behavior: for an ordinary flag, and for api_server_count.
_AS_IT_IS = ((None, False), (None, 0, 1))


@dataclass(frozen=True)
class ServeRequest:
    """Options of a start, and the bundle that was found for it.

    - `listen`: vLLM's host and port arguments.
    - `mode`: name of a start mode, or "auto".
    - `without_bundle`: start stock vLLM if no bundle is found.
    - `ready_timeout`: seconds within which the server must be ready. None means no limit.
    - `trust`: decides which bundles may provide code. With `require_signature`, an untrusted bundle is rejected altogether;
      otherwise only its code is ignored.
    - `weights_from`: source of the weights, or None for the model's own directory. `weights_rate_limit` limits the fetch rate.
    - `defer_capture`: capture most CUDA graphs after the server is ready.
    - `templates`: directory of additional templates.
    - `on_process_start`: called with the PID of each server process that is created.
    - `on_progress`: called with each progress report of the server.
    """

    lookup: BundleLookup
    listen: Sequence[str] = ()
    mode: str = "auto"
    without_bundle: bool = False
    ready_timeout: float | None = None
    require_signature: bool = False
    scheduler: SchedulerSettings = STOCK
    trust: TrustCheck = inspection.trust
    weights_from: str | None = None
    weights_rate_limit: LimitedFetch | None = None
    defer_capture: bool = False
    templates: Path | None = None
    on_process_start: Callable[[int], None] = lambda pid: None
    on_progress: start_progress.Report = start_progress.ignore_progress


@dataclass(frozen=True)
class ServerStart:
    """A start in progress: its request, launch plan, begin in seconds on CLOCK_MONOTONIC, and the Unix socket it creates."""

    request: ServeRequest
    plan: LaunchPlan
    began: float
    socket: Path | None = None


def plan(request: ServeRequest) -> LaunchPlan:
    """Build the launch plan of a request, whose scheduler settings must have been checked.

    Raises:
        NoBundleError: No bundle was found, and the request needs one.
        CommandFailedError: The bundle has no weights plan, or lacks a required signature.
        UsageError: The weight files of the model cannot be loaded.
    """
    lookup = request.lookup
    if request.weights_from is None and lookup.model.repo_id is None:
        # Report missing weights before a missing bundle, which could not be built without them.
        resolution.check_weights(lookup.model)
    signed_by = request.trust if request.require_signature else None
    missing = inspection.check_bundle(lookup, is_required=not request.without_bundle, signed_by=signed_by)
    weights = fetch.choose_weights_source(
        lookup, request.weights_from, request.weights_rate_limit, request.listen, request.trust
    )
    if lookup.bundle is None:
        planned = prepare.plan_without_bundle(lookup, weights, missing)
    else:
        planned = prepare.plan_with_bundle(lookup, lookup.bundle, weights, trust=request.trust)
    if request.defer_capture:
        planned = _defer_capture(planned)
    planned.fallbacks.extend([*list_ineffective_flags(planned.vllm_args), *weights.fallbacks])
    return scheduler.apply_scheduler(planned, request.scheduler, lookup.bundle, on_cpu=runtime.targets_cpu())


def _defer_capture(plan: LaunchPlan) -> LaunchPlan:
    if runtime.targets_cpu() or plan.engine.restore is not None:
        here = "the bundle's graphs are restored" if plan.engine.restore else "the CPU has no CUDA graphs"
        plan.fallbacks.append(Fallback("graphs", f"--capture deferred has no effect: {here}"))
        return plan
    return replace(plan, engine=replace(plan.engine, deferred=True))


def list_ineffective_flags(given: Arguments) -> list[Fallback]:
    """Return a fallback for each flag in `given` that has no effect on coldstart's servers."""
    return [
        Fallback("server", f"--{name.replace('_', '-')} has no effect: {reason}")
        for name, reason in INEFFECTIVE_FLAGS.items()
        if given.get_value(name) not in _AS_IT_IS[name == "api_server_count"]
    ]
