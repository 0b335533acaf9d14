"""Start a server in the fastest start mode that works, and report why each faster mode was not used.

Invariant: the last mode is `fresh`, a new process. A server whose restored state generates wrong tokens never serves
requests.
"""

from __future__ import annotations

import re
import shlex
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from coldstart.artifacts.errors import BundleError
from coldstart.contract.fallback import Fallback
from coldstart.contract.plan import LaunchPlan
from coldstart.errors import ColdstartError, LaunchRefusedError
from coldstart.launch import caches, fetch, modes, planning, prepare
from coldstart.launch.modes import FRESH, Reason, StartMode
from coldstart.launch.planning import ServeRequest, ServerStart
from coldstart.launch.server import Server, UnusedModes
from coldstart.launch.server_process import ReadyServer, ServerExitedError
from coldstart.system import timeline
from coldstart.system.ipc.peers import PeerError


def start_server(request: ServeRequest, plan: LaunchPlan) -> Server:
    """Start the server in the requested mode, or in the next mode that works, and wait until it is ready.

    Raises:
        CommandFailedError: The server exits or is not ready in time.
    """
    root = plan.env.get("VLLM_CACHE_ROOT")
    unused = UnusedModes(caches.remove_truncated_libraries(Path(root)) if root is not None else [])
    uds = plan.vllm_args.get_value("uds")
    # A socket that exists already may be that of another server.
    socket = Path(str(uds)) if uds and not Path(str(uds)).exists() else None
    one = ServerStart(request, plan, timeline.now(), socket)
    for mode in modes.list_modes_to_try(request.mode):
        if (started := _attempt(mode, one, unused)) is not None:
            return started
    raise AssertionError("unreachable: mode fresh starts a server or raises an error")


def find_planned_mode(request: ServeRequest, plan: LaunchPlan) -> tuple[str, list[Fallback]]:
    """Return the first mode that `start_server` would try, and a fallback for each faster mode. Start nothing."""
    one, skipped = ServerStart(request, plan, timeline.now()), list[Fallback]()
    for mode in modes.list_modes_to_try(request.mode):
        if (why := _find_obstacle(mode, one)) is None:
            return mode.name, skipped
        skipped.append(_create_fallback(mode, one, why))
    raise AssertionError("unreachable: mode fresh is always available")


def _find_obstacle(mode: StartMode, one: ServerStart) -> Reason | None:
    try:
        return mode.find_unusable_reason(one) or modes.find_criu_limit(mode)
    except (BundleError, LaunchRefusedError) as error:
        return Reason(str(error), error.hint or "")


def _create_fallback(mode: StartMode, one: ServerStart, why: Reason) -> Fallback:
    model = shlex.quote(one.request.lookup.model.cli_argument)
    return Fallback(mode.name, why.reason, re.sub(r"\bMODEL\b", lambda _: model, why.hint))


def _attempt(mode: StartMode, one: ServerStart, unused: UnusedModes) -> Server | None:
    """Start the server in `mode`. If that fails, record the reason in `unused`, and return None to try the next mode."""
    try:
        if (why := mode.find_unusable_reason(one)) is not None:
            listed = unused.unavailable if one.request.mode == modes.AUTO else unused.fallbacks
            listed += [_create_fallback(mode, one, why)]
            return None
        plan, config = one.plan, one.request.lookup.model.config
        with fetch.start_early_fetch(plan, config) if mode.loads_weights else ExitStack() as early:
            running = _launch(mode, one)
            # A later node of a pipeline reports readiness before it loads its weights.
            early_fetch = early.pop_all() if plan.vllm_args.contains_flag("headless") else None
    except ServerExitedError as died:
        if one.plan.weights_from is not None and died.cause and died.cause.lost_weights:
            return _start_fresh(_without_source(one, died, unused), unused)
        if mode is FRESH or died.is_final:
            return _start_fresh(_without_untrusted_bundle(one, died, unused), unused)
        unused.record_failure(mode.name, died)
        return None
    except (PeerError, BundleError, LaunchRefusedError) as error:
        unused.record_failure(mode.name, error)
        return None
    if running.report.get("canary") is not False:
        return Server(mode.name, one.plan, running, unused, began=one.began, early_fetch=early_fetch)
    running.process.wait()
    reason = (
        f"a {mode.name} start generated another token than the bundle's canary, so the bundle is not used"
    )
    unused.fallbacks += [Fallback("canary", reason)]
    return _start_fresh(replace(one, plan=prepare.drop_restored_state(one.plan)), unused)


def _start_fresh(one: ServerStart, unused: UnusedModes) -> Server:
    return Server(FRESH.name, one.plan, _launch(FRESH, one), unused, began=one.began)


def _launch(mode: StartMode, one: ServerStart) -> ReadyServer:
    if one.socket is not None:
        one.socket.unlink(missing_ok=True)  # vLLM does not replace the socket of a server that has failed
    return mode.launch(one)


def _without_untrusted_bundle(one: ServerStart, died: ServerExitedError, unused: UnusedModes) -> ServerStart:
    """Return the start without its bundle if the bundle is untrusted, because such a bundle must not prevent a start.

    Raises:
        ServerExitedError: The bundle is trusted or not used. The error is `died`.
    """
    request, lookup = one.request, one.request.lookup
    if lookup.bundle is None or request.trust(lookup.bundle).is_trusted:
        raise died
    reason = f"{died.message}; the start continues without the bundle {lookup.bundle.ref}, which has no trusted signature"
    unused.fallbacks += [Fallback("bundle", reason)]
    missing = replace(lookup, bundle=None, untrusted=lookup.bundle)
    ordinary = replace(request, lookup=missing, without_bundle=True)
    return replace(one, request=ordinary, plan=planning.plan(ordinary))


def _without_source(one: ServerStart, died: ServerExitedError, unused: UnusedModes) -> ServerStart:
    """Return the start with local weights, after the remote weights source has failed.

    Raises:
        ServerExitedError: There are no local weights. The error is `died`.
    """
    request = replace(one.request, weights_from=None)
    try:
        plan = planning.plan(request)
    except ColdstartError as error:
        died.hint = f"pass --weights-from with a source that has the weights; no local weights can be used: {error.message}"
        raise died from error
    unused.fallbacks += [
        Fallback("weights", f"{died.message.rstrip('.')}; the model's directory is read instead")
    ]
    return replace(one, request=request, plan=plan)
