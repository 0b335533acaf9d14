"""Bring a model up on this machine: build its bundle if none fits, prepare the fastest start mode, and serve."""

import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer
from coldstart.commands import _serving
from coldstart.commands._options import Common, Model, Revision, Untrusted
from coldstart.commands._options import command as declare

from coldstart.contract import environment
from coldstart.contract.fallback import decode
from coldstart.errors import ColdstartError, CommandFailedError
from coldstart.system import secrets, timeline

if TYPE_CHECKING:
    from coldstart.artifacts.bundle import Bundle

    from coldstart.contract.plan import LaunchPlan
    from coldstart.launch.planning import ServeRequest
    from coldstart.launch.preparation import Preparation
    from coldstart.launch.up_records import UpDirectory, UpRecord
    from coldstart.models.inspection import Lookup
    from coldstart.system.start_progress import Report

_TERMINATED = 128 + signal.SIGTERM
_PREPARATION = "preparation"
# Member of the report in which a detached server passes its phases, as bars, to the command.
_PHASES = "phases"


@dataclass(frozen=True)
class _Start:
    """A server of a model that is being brought up. `release` ends the lock under which it starts."""

    common: Common
    built_bundle: bool
    directory: "UpDirectory"
    request: "ServeRequest"
    release: Callable[[], None]
    detach: bool
    prepared: "Preparation"


@declare(takes_vllm_args=True)
def command(
    common: Common,
    model: Model,
    host: _serving.Host = None,
    port: _serving.Port = None,
    revision: Revision = None,
    ready_timeout: _serving.ReadyTimeout = None,
    detach: Annotated[
        bool,
        typer.Option(
            "--detach",
            "-d",
            help="Return when the server is ready, and leave it running until coldstart down.",
        ),
    ] = False,
    untrusted: Untrusted = False,
) -> None:
    """Build what is missing, start the server, and wait until it ends, or with --detach until it is ready."""
    from coldstart.launch import listening, up_records
    from coldstart.launch.planning import ServeRequest
    from coldstart.system.recording import recording

    lookup = _serving.find(common, model, revision, untrusted=untrusted)
    directory = up_records.find_directory(lookup)
    with ExitStack() as lock:
        if (running := _claim(common, lookup, model, lock)) is not None:
            _require_same(common, running, lookup, host, port)
            _show_running(common, running)
            return
        try:
            listen = listening.choose_address(host, port, lookup.vllm_args)
            listening.require_free_port(lookup.vllm_args, listen)
            planned_url = listening.find_url(lookup.vllm_args.append(*listen))
            directory.write(up_records.describe_own(lookup, planned_url))
            with recording():
                request = ServeRequest(
                    _ensure_bundle(common, lookup), listen, without_bundle=True, ready_timeout=ready_timeout
                )
                prepared, built = _prepare(common, request), request.lookup is not lookup
                code = _bring_up(_Start(common, built, directory, request, lock.close, detach, prepared))
        except BaseException as error:
            directory.end()
            _show_termination(common, model, getattr(error, "code", None))
            raise
    _show_termination(common, model, code)
    raise typer.Exit(code)


def _show_termination(common: Common, model: str, code: object) -> None:
    if code == _TERMINATED:
        common.out.note(f"{model} was stopped by SIGTERM, which coldstart down sends.")


def _claim(common: Common, lookup: "Lookup", model: str, lock: ExitStack) -> "UpRecord | None":
    """Return the server of the model that is up. If there is none, record this process as the one that starts it.

    Two commands at one moment decide one after the other. `lock` then contains the lock under which the server starts.
    """
    from coldstart.launch import up_records

    own = up_records.find_directory(lookup)
    own.lock(lock, lambda: common.out.note(f"Waiting for another start of {model}"))
    running = own.read() or _choose_other(common, lookup, model)
    if running is not None:
        lock.close()
        return running
    if (ended := own.read_last()) is not None:
        process = f"process {ended.pid} has ended"
        common.out.note(f"The recorded server of {model} no longer runs: {process}")
    own.write(up_records.describe_own(lookup))
    return None


def _choose_other(common: Common, lookup: "Lookup", model: str) -> "UpRecord | None":
    """Return a server of the model under another key, None to start another.

    The user asks for another server by typing arguments or the version of a bundle. Arguments that come from the newest
    bundle are no request.
    """
    from coldstart.launch import up_records
    from coldstart.models import resolver

    others = up_records.find_others(lookup)
    if others and not common.typed_args and resolver.find_versioned(common.store(), model) is None:
        renew = f"(hint: to restart it: {_describe_restart(others[0])})"
        common.out.note(f"{_describe_other(others[0], lookup)} {renew}")
        return others[0]
    for one in others:
        common.out.note(f"{_describe_other(one, lookup)}. Starting another server")
    return None


def _describe_other(other: "UpRecord", lookup: "Lookup") -> str:
    """Describe how a server of the model differs from the one of the lookup."""
    there = f"{other.argument} is up" + (f" at {other.url}" if other.url else "")
    wanted, others = (
        shlex.join(args) or "none" for args in (secrets.arguments(lookup.vllm_args), other.vllm_args)
    )
    if wanted == others:
        return f"{there}, started before the model, its environment or vLLM changed"
    return f"{there} with other arguments: {others}, not {wanted}"


def _prepare(common: Common, request: "ServeRequest") -> "Preparation":
    """Prepare the start mode, and report what could not be prepared."""
    from coldstart.launch import planning, preparation

    for note in request.lookup.notes:
        common.out.warn(note)
    # The address belongs to the server alone: a template forks servers for any.
    prepared = preparation.prepare_fastest(
        request.lookup,
        planning.plan(replace(request, listen=())),
        partial(_measure, common),
        request.ready_timeout,
    )
    for failure in prepared.failures:
        common.out.note(f"not prepared: {failure}")
    return prepared


@contextmanager
def _measure(common: Common, name: str) -> Iterator[Callable[[str], None]]:
    """Show a step of the preparation, as `Output.phase`, and record it."""
    with timeline.measure(name, track=_PREPARATION), common.out.phase(name) as step:
        yield step


def _bring_up(start: _Start) -> int:
    """Start the prepared server. Return 0 when it is ready if it detaches, else its exit code when it ends."""
    from coldstart.launch import planning

    common, request, prepared = start.common, start.request, start.prepared
    plan = planning.plan(request)
    took = {"mode": prepared.mode, "seconds": round(time.monotonic() - common.out.started, 4)}
    before = {"preparation": took | {"built_bundle": start.built_bundle, "is_new": prepared.is_new}}

    def announce_whole(report: dict[str, Any]) -> None:
        phases, stop = report.pop(_PHASES), _describe_stop(start)
        _announce(common, report | before, _serving.describe_request(report, plan.vllm_args), stop)
        common.out.detail(*phases.splitlines())

    if not start.detach:
        return _serve(start, plan, announce_whole)
    from coldstart.commands._detach import start_detached

    log = start.directory.log
    with _serving.show_start(common, detached=True) as show:
        report = start_detached(log, lambda announce: _serve(start, plan, announce, announce.show), show)
    with common.out.gather():
        announce_whole(report | {"log": str(log)})
        common.out.note(f"The log of the server is {log}")
        _serving.advise(common, request, plan, report)
    return 0


def _describe_stop(start: _Start) -> str:
    """Return how to stop the server, with and without the template that a next `up` uses, in one line."""
    from coldstart.launch import preparation

    down = shlex.join(["coldstart", "down", start.request.lookup.model.argument])
    warm = preparation.find_template(start.request.lookup, start.prepared)
    if warm is None or warm.pid is None:
        return (
            f"Stop it: {down}"
            if start.detach
            else "Stop it: Ctrl-C; with --detach the server runs in the background"
        )
    if start.detach:
        return f"Stop it: {down} --keep-template, or, with its template: {down}"
    return f"Stop it: Ctrl-C, which keeps the template; then, to stop the template: {down}"


def _ensure_bundle(common: Common, lookup: "Lookup") -> "Lookup":
    """Return the lookup with a bundle. If it cannot be built, report why and return the lookup without one."""
    if lookup.bundle is not None:
        common.out.note(f"Using the bundle {lookup.bundle.name}:v{lookup.bundle.version}")
        return lookup
    if lookup.untrusted is not None:
        _report_untrusted(common, lookup, lookup.untrusted)
    try:
        with timeline.measure("build the bundle", track=_PREPARATION):
            return _serving.materialize(common, lookup)
    except (ColdstartError, OSError) as error:
        if isinstance(error, CommandFailedError) and error.is_final:
            raise
        hint = getattr(error, "hint", None)
        first, *more = getattr(error, "lines", [str(error)])
        common.out.warn(f"no bundle was built: {first}" + (f" (hint: {hint})" if hint else ""), *more)
        return lookup


def _report_untrusted(common: Common, lookup: "Lookup", untrusted: "Bundle") -> None:
    """Warn that a bundle is built although an untrusted one has its key.

    Raises NoBundleError where only the untrusted bundle knows the arguments: without them another bundle would be built.
    """
    from coldstart.models import inspection

    found = inspection.miss(lookup)
    if untrusted.key != lookup.key:
        raise found
    common.out.warn(f"{found.message}; building one (hint: {found.hint})")


def _serve(
    start: _Start,
    plan: "LaunchPlan",
    announce: Callable[[dict[str, Any]], None],
    on_progress: "Report | None" = None,
) -> int:
    """Record the server under this process, start it, and return its exit code when it ends."""
    from coldstart.launch import up_records
    from coldstart.launch.listening import find_url

    log = str(start.directory.log) if start.detach else None
    own = replace(up_records.describe_own(start.request.lookup, find_url(plan.vllm_args)), log=log)
    start.directory.write(own)

    def announce_recorded(report: dict[str, Any], phases: str) -> None:
        address = {"url": report["url"], "host": plan.vllm_args.value("host")}
        start.directory.write(replace(own, mode=report["mode"], **address))
        start.release()
        announce(report | {_PHASES: phases})

    try:
        return _serving.run(
            start.common,
            start.request,
            plan,
            announce_recorded,
            on_progress=on_progress,
        )
    finally:
        start.directory.end()


def _announce(common: Common, report: dict[str, Any], attempt: str | None, stop: str) -> None:
    for fallback in decode(report["fallbacks"]):
        common.out.warn(str(fallback))
    common.out.result(report, lambda: _serving.describe(report, phases_follow=common.out.verbose))
    if attempt and common.out.format == "text":
        common.out.note(f"Try: {attempt}")
    common.out.note(stop)


def _require_same(
    common: Common, running: "UpRecord", lookup: "Lookup", host: str | None, port: int | None
) -> None:
    """Raise CommandFailedError if the running server has another address or other settings than the user asks for.

    What is typed, and an API key, is a request. Environment, bundle and defaults are none: warn.
    """
    from coldstart.launch import listening, up_records

    given, url = common.vllm_args, urlsplit(running.url or "")
    host = host if host is not None else given.value("host")
    port = port if port is not None else given.number("port", 0)
    there = str(running.host or url.hostname or "")
    differing = up_records.list_differences(running.settings, up_records.digest_settings(lookup, os.environ))
    if running.key != lookup.key.digest:  # what else differs was printed
        differing = [name for name in differing if name == up_records.API_KEY]
    asks = up_records.API_KEY in differing and bool(environment.VLLM_API_KEY.read())
    asks |= common.typed_args and any(
        name.startswith("--") or name == up_records.API_KEY for name in differing
    )
    if running.url and host is not None and not listening.is_listening(there, str(host)):
        differing.insert(0, f"--host {host}")
        asks |= "host" in common.typed or given.gives("host")
    if running.url and port not in (0, url.port):
        differing.insert(0, f"--port {port}")
        asks |= "port" in common.typed or given.gives("port")
    if not differing:
        return
    address = running.url or running.planned_url
    problem = f"{running.argument} is already up at {address} with other settings: {', '.join(differing)}"
    if asks:
        raise CommandFailedError(problem, hint=_describe_restart(running))
    common.out.warn(f"{problem} (hint: {_describe_restart(running)})")


def _describe_restart(running: "UpRecord") -> str:
    return f"coldstart down {running.argument}, then coldstart up"


def _show_running(common: Common, running: "UpRecord") -> None:
    data = {"url": running.url, "mode": running.mode, "pid": running.pid, "already_up": True}
    common.out.result(data | {"log": running.log}, f"{running.url}  {running.mode}, already up")
    if running.log is not None:
        common.out.note(f"The log of the server is {running.log}")
