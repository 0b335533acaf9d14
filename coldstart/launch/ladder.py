"""Start a server with the first start mode that works, and report why each faster mode did not.

Invariant: the last mode is `fresh`, vLLM's ordinary start. A server whose restored state gives wrong answers never serves.
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
from coldstart.contract.weights import LOST
from coldstart.errors import ColdstartError, LaunchRefusedError
from coldstart.launch import caches, fetch, modes, planning, prepare
from coldstart.launch.modes import FRESH, Reason, StartMode
from coldstart.launch.planning import ServeRequest, ServerStart
from coldstart.launch.server import FETCH_REST, Account, Server
from coldstart.launch.server_process import ServerExitedError
from coldstart.system import timeline
from coldstart.system.ipc.peers import PeerError


def start(request: ServeRequest, plan: LaunchPlan) -> Server:
    """Start the server with the requested mode, or the next one that works, and wait until it is ready.

    Raises:
        CommandFailedError: The server exits or is not ready in time.
    """
    account = Account(_remove_unfinished(plan))
    one = ServerStart(request, plan, timeline.now())
    for mode in modes.attempts(request.mode):
        if (started := _attempt(mode, one, account)) is not None:
            return _fetch_rest(started, request) if request.fetch_rest else started
    raise AssertionError("the ladder ends with fresh, which either starts or raises")


def find_mode(request: ServeRequest, plan: LaunchPlan) -> tuple[str, list[Fallback]]:
    """Return the name of the mode that `start` tries first, and why it tries no faster one; nothing is started."""
    one, skipped = ServerStart(request, plan, timeline.now()), list[Fallback]()
    for mode in modes.attempts(request.mode):
        if (why := _find_obstacle(mode, one)) is None:
            return mode.name, skipped
        skipped.append(_name_model(mode, one, why))
    raise AssertionError("fresh is available everywhere")


def _find_obstacle(mode: StartMode, one: ServerStart) -> Reason | None:
    try:
        why = mode.unavailable(one)
        return modes.find_obstacle(mode) if why is None else _name_first(mode, one, why)
    except (BundleError, LaunchRefusedError) as error:
        return Reason(str(error), error.hint or "")


def _name_first(mode: StartMode, one: ServerStart, why: Reason) -> Reason:
    """Return what the user must fix first: what a requested mode lacks cannot be created where the mode cannot run.

    With `auto` CRIU is not probed, because each start would wait for the probe.
    """
    if one.request.mode == modes.AUTO or mode.unavailable() is not None:
        return why
    return modes.find_obstacle(mode) or why


def _name_model(mode: StartMode, one: ServerStart, why: Reason) -> Fallback:
    """Return the fallback of the mode. Some hints belong to the mode: the user can type them with the model of this start."""
    model = shlex.quote(one.request.lookup.model.argument)
    return Fallback(mode.name, why.reason, re.sub(r"\bMODEL\b", lambda _: model, why.hint))


def _remove_unfinished(plan: LaunchPlan) -> list[Fallback]:
    root = plan.env.get("VLLM_CACHE_ROOT")
    return caches.remove_unfinished(Path(root)) if root is not None else []


def _attempt(mode: StartMode, one: ServerStart, account: Account) -> Server | None:
    """Return the server that `mode` started, None if the next mode is to be tried."""
    try:
        if (why := mode.unavailable(one)) is not None:
            why = _name_first(mode, one, why)
            listed = account.unavailable if one.request.mode == modes.AUTO else account.fallbacks
            listed += [_name_model(mode, one, why)]
            return None
        plan, config = one.plan, one.request.lookup.model.config
        with fetch.start_early(plan, config) if mode.loads_weights else ExitStack() as early:
            running = mode.launch(one)
            # A later node of a pipeline reports readiness before it loads its weights.
            ahead = early.pop_all() if plan.vllm_args.gives("headless") else None
    except ServerExitedError as died:
        if one.plan.weights_from is not None and LOST in died.message:
            return _start_fresh(_without_source(one, died, account), account)
        if mode is FRESH or died.is_final:
            return _start_fresh(_without_untrusted_bundle(one, died, account), account)
        account.fall_back(mode.name, died)
        return None
    except (PeerError, BundleError, LaunchRefusedError) as error:
        account.fall_back(mode.name, error)
        return None
    if running.report.get("canary") is not False:
        return Server(mode.name, one.plan, running, account, began=one.began, ahead=ahead)
    running.process.wait()
    return _start_fresh(_without_bundle_state(mode.name, one, account), account)


def _start_fresh(one: ServerStart, account: Account) -> Server:
    return Server(FRESH.name, one.plan, FRESH.launch(one), account, began=one.began)


def _without_untrusted_bundle(one: ServerStart, died: ServerExitedError, account: Account) -> ServerStart:
    """Return the start without a bundle that no trusted key signed: such a bundle must not stop a server.

    Raises:
        ServerExitedError: `died`, if the start used no such bundle.
    """
    request, lookup = one.request, one.request.lookup
    if lookup.bundle is None or request.trust(lookup.bundle).ok:
        raise died
    reason = f"{died.message}; the bundle {lookup.bundle.ref} has no trusted signature and is not used"
    account.fallbacks += [Fallback("bundle", reason)]
    missing = replace(lookup, bundle=None, untrusted=lookup.bundle)
    ordinary = replace(request, lookup=missing, without_bundle=True)
    return replace(one, request=ordinary, plan=planning.plan(ordinary))


def _without_source(one: ServerStart, died: ServerExitedError, account: Account) -> ServerStart:
    """Return the start from the model's own directory, after the source lost the weights while the server started.

    Raises:
        ServerExitedError: `died`, if that directory has no weights.
    """
    request = replace(one.request, weights_from=None)
    try:
        plan = planning.plan(request)
    except ColdstartError as error:
        died.hint = f"pass --weights-from a source that has the weights of the bundle: {error.message}"
        raise died from error
    account.fallbacks += [
        Fallback("weights", f"{died.message.rstrip('.')}: the model's own directory is read")
    ]
    return replace(one, request=request, plan=plan)


def _without_bundle_state(mode: str, one: ServerStart, account: Account) -> ServerStart:
    """Return the start without restored state of the bundle, after `mode` gave a wrong canary token."""
    reason = (
        f"a {mode} start gave another token than the bundle's canary: the server starts without the bundle"
    )
    account.fallbacks += [Fallback("canary", reason)]
    return replace(one, plan=prepare.distrusting(one.plan))


def _fetch_rest(started: Server, request: ServeRequest) -> Server:
    from coldstart.weights.prefetch import PrefetchError

    try:
        started.rest = fetch.rest(started.plan, request.lookup.model.config)
    except (PrefetchError, OSError, ValueError) as error:
        started.account.fall_back(FETCH_REST, error)
    return started
