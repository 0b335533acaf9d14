"""Bring a model up on this machine: build its bundle if none fits, prepare the fastest start mode, and serve."""

import os
import shlex
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer
from coldstart.commands import _serving
from coldstart.commands._options import Common, Model, Revision, Untrusted
from coldstart.commands._options import command as declare

from coldstart.contract import environment
from coldstart.errors import ColdstartError, CommandFailedError
from coldstart.system.proc import processes

if TYPE_CHECKING:
    from coldstart.artifacts.bundle import Bundle

    from coldstart.contract.plan import LaunchPlan
    from coldstart.launch.planning import ServeRequest
    from coldstart.launch.preparation import Preparation
    from coldstart.launch.up_records import UpDirectory, UpRecord
    from coldstart.models.inspection import Lookup

_TERMINATED = 128 + signal.SIGTERM


@dataclass
class _Start:
    """A server of a model that is being brought up. `own` is its record."""

    common: Common
    directory: "UpDirectory"
    request: "ServeRequest"
    own: "UpRecord"
    prepared: "Preparation"
    built_bundle: bool

    def record(self, report: Mapping[str, Any], plan: "LaunchPlan") -> None:
        """Record the address and the mode of the ready server, by which other commands find it."""
        host = plan.vllm_args.value("host")
        self.own = replace(self.own, url=report["url"], mode=report["mode"], host=host)
        self.directory.write(self.own)


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

    lookup = _serving.find(common, model, revision, untrusted=untrusted)
    directory = up_records.find_directory(lookup)
    lock = directory.claim(lambda: common.out.note(f"Waiting for another start of {model}"))
    if not isinstance(lock, int):
        _require_same(common, lock, lookup, host, port)
        _show_running(common, lock)
        return
    if (ended := directory.read_last()) is not None:
        common.out.note(f"The recorded server of {model} no longer runs: process {ended.pid} has ended")
    # Until the server can be reached, a `down` must find this process.
    own = up_records.describe_own(lookup)
    directory.write(own)
    try:
        listen = listening.choose_address(host, port, lookup.vllm_args)
        listening.require_free_port(lookup.vllm_args, listen)
        own = replace(own, planned_url=listening.find_url(lookup.vllm_args.append(*listen)))
        directory.write(own)
        found = _ensure_bundle(common, lookup)
        request = ServeRequest(found, listen, without_bundle=True, ready_timeout=ready_timeout)
        start = _Start(common, directory, request, own, _prepare(common, request), found is not lookup)
        if detach:
            options = [*(["--revision", revision] if revision else []), *(["--untrusted"] * untrusted)]
            _detach(start, [model, *options], lock)
            return
        code = _serve(start)
        directory.end()
    except BaseException as error:
        directory.end()
        _show_termination(common, model, getattr(error, "code", None))
        raise
    finally:
        os.close(lock)
    _show_termination(common, model, code)
    raise typer.Exit(code)


def _show_termination(common: Common, model: str, code: object) -> None:
    if code == _TERMINATED:
        common.out.note(f"{model} was stopped by SIGTERM, which coldstart down sends.")


def _prepare(common: Common, request: "ServeRequest") -> "Preparation":
    """Prepare the start mode, and report what could not be prepared."""
    from coldstart.launch import planning, preparation

    for note in request.lookup.notes:
        common.out.warn(note)
    # The address belongs to the server alone: a template forks servers for any.
    prepared = preparation.prepare_fastest(
        request.lookup,
        planning.plan(replace(request, listen=())),
        common.out.phase,
        request.ready_timeout,
    )
    for failure in prepared.failures:
        common.out.note(f"not prepared: {failure}")
    return prepared


def _serve(start: _Start) -> int:
    """Start the prepared server, and return its exit code when it ends."""
    from coldstart.launch import planning

    plan = planning.plan(start.request)

    def announce(report: dict[str, Any]) -> None:
        start.record(report, plan)
        _announce(start, plan, report, is_detached=False)

    return _serving.run(start.common, start.request, plan, announce)


def _detach(start: _Start, words: list[str], lock: int) -> None:
    """Start the prepared server in the background, where it holds the lock, and return when it is ready."""
    from coldstart.commands._serving import start_detached

    from coldstart.launch import planning

    common, request, log = start.common, start.request, start.directory.log
    plan = planning.plan(request)
    timeout = request.ready_timeout
    words += ["--on-miss", "warn", "--mode", "auto", "--cache-dir", str(common.cache.root), *request.listen]
    words += [] if timeout is None else ["--ready-timeout", str(timeout)]
    words += [
        option for option, given in (("--offline", common.offline), ("-v", common.out.verbose)) if given
    ]

    def record(pid: int) -> None:
        start.own = replace(start.own, pid=pid, birth=processes.birth(pid), log=str(log))
        start.directory.write(start.own)

    with _serving.show_start(common, detached=True) as show:
        report = start_detached([*words, "--", *request.lookup.vllm_args], log, lock, record, show)
    start.record(report, plan)
    with common.out.gather():
        _announce(start, plan, {**report, "log": str(log)}, is_detached=True)
        common.out.note(f"The log of the server is {log}")
        _serving.advise(common, request, plan, report)


def _describe_stop(start: _Start, *, is_detached: bool) -> str:
    """Return how to stop the server, with and without the template that a next `up` uses, in one line."""
    down = shlex.join(["coldstart", "down", start.request.lookup.model.argument])
    if start.prepared.template is None:
        return (
            f"Stop it: {down}"
            if is_detached
            else "Stop it: Ctrl-C; with --detach the server runs in the background"
        )
    if is_detached:
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


def _announce(start: _Start, plan: "LaunchPlan", report: dict[str, Any], *, is_detached: bool) -> None:
    common, prepared = start.common, start.prepared
    seconds = time.monotonic() - common.out.started - report["ready_s"]
    took = {"mode": prepared.mode, "seconds": round(seconds, 4), "built_bundle": start.built_bundle}
    report = report | {"preparation": took | {"is_new": prepared.is_new}}
    _serving.show(common, report)
    if common.out.format == "text" and (attempt := _serving.describe_request(report, plan.vllm_args)):
        common.out.note(f"Try: {attempt}")
    common.out.note(_describe_stop(start, is_detached=is_detached))


def _require_same(
    common: Common, running: "UpRecord", lookup: "Lookup", host: str | None, port: int | None
) -> None:
    """Raise CommandFailedError if the running server has another address or other settings than the user asks for.

    What is typed, and an API key, is a request. Bundle and defaults are none: warn.
    """
    from coldstart.launch import listening, up_records

    given, url = common.vllm_args, urlsplit(running.url or "")
    host = host if host is not None else given.value("host")
    port = port if port is not None else given.number("port", 0)
    there = str(running.host or url.hostname or "")
    differing = up_records.list_differences(running, lookup)
    asks = common.typed_args and bool(differing)
    asks |= up_records.API_KEY in differing and bool(environment.VLLM_API_KEY.read())
    if host is not None and not listening.is_listening(there, str(host)):
        differing.insert(0, f"--host {host}")
        asks |= "host" in common.typed or given.gives("host")
    if port not in (0, url.port):
        differing.insert(0, f"--port {port}")
        asks |= "port" in common.typed or given.gives("port")
    problem = f"{running.argument} is already up at {running.url} with other settings: {', '.join(differing)}"
    if asks:
        raise CommandFailedError(problem, hint=_describe_restart(running))
    if not differing and running.key != lookup.key.digest:
        problem = f"{running.argument} was started before the model, its environment or vLLM changed"
    if differing or running.key != lookup.key.digest:
        common.out.warn(f"{problem} (hint: {_describe_restart(running)})")


def _describe_restart(running: "UpRecord") -> str:
    return f"coldstart down {running.argument}, then coldstart up"


def _show_running(common: Common, running: "UpRecord") -> None:
    data = {"url": running.url, "mode": running.mode, "pid": running.pid, "already_up": True}
    common.out.result(data | {"log": running.log}, f"{running.url}  {running.mode}, already up")
    if running.log is not None:
        common.out.note(f"The log of the server is {running.log}")
