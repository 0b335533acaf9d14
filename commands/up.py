"""Serve a model on this machine: build its bundle if none matches, prepare the fastest start mode, and start the server."""

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
from coldstart.contract.plan import LaunchPlan
from coldstart.errors import ColdstartError, CommandFailedError
from coldstart.system.proc import processes

if TYPE_CHECKING:
    from coldstart.artifacts.bundle import Bundle

    from coldstart.launch.planning import ServeRequest
    from coldstart.launch.preparation import Preparation
    from coldstart.launch.up_records import UpDirectory, UpRecord
    from coldstart.models.inspection import BundleLookup

_TERMINATED = 128 + signal.SIGTERM


@dataclass
class _Start:
    """State of one run of `up`: what it starts, what it has prepared, and `own_record`, its entry in the records of `up`."""

    common: Common
    directory: "UpDirectory"
    request: "ServeRequest"
    own_record: "UpRecord"
    prepared: "Preparation"
    built_bundle: bool

    def record(self, report: Mapping[str, Any], plan: LaunchPlan) -> None:
        """Record the URL and the start mode of the ready server, so that other commands find it."""
        host = plan.vllm_args.get_value("host")
        self.own_record = replace(self.own_record, url=report["url"], mode=report["mode"], host=host)
        self.directory.write(self.own_record)


@declare(takes_vllm_args=True)
def command(
    common: Common,
    model: Model,
    host: _serving.Host = None,
    port: _serving.Port = None,
    revision: Revision = None,
    ready_timeout: _serving.ReadyTimeout = None,
    capture: _serving.Capture = "all",
    detach: Annotated[
        bool,
        typer.Option(
            "--detach",
            "-d",
            help="Return when the server is ready, and keep it running in the background until you run `coldstart down`.",
        ),
    ] = False,
    untrusted: Untrusted = False,
) -> None:
    """Build what is missing, start the server, and wait until it exits, or with --detach until it is ready."""
    from coldstart.launch import listening, up_records
    from coldstart.launch.planning import ServeRequest

    lookup = _serving.look_up_model(common, model, revision, untrusted=untrusted)
    directory = up_records.find_directory(lookup)
    lock = directory.claim(lambda: common.out.print_note(f"Waiting for another start of {model}"))
    if not isinstance(lock, int):
        _require_same_settings(common, lock, lookup, host, port)
        _show_running(common, lock)
        return
    if (ended := directory.read_last()) is not None:
        common.out.print_note(
            f"The previous server of {model} no longer runs: process {ended.pid} has exited"
        )
    # Until the server accepts requests, `down` must be able to find and stop this process.
    own_record = up_records.create_own_record(lookup)
    directory.write(own_record)
    try:
        listen = listening.build_address_arguments(host, port, lookup.vllm_args)
        listening.require_usable_address(lookup.vllm_args, listen)
        planned_url = listening.find_url(lookup.vllm_args.append(*listen))
        own_record = replace(own_record, planned_url=planned_url)
        directory.write(own_record)
        final = _ensure_bundle(common, lookup)
        defers = capture == _serving.DEFERRED
        request = ServeRequest(
            final, listen, without_bundle=True, ready_timeout=ready_timeout, defer_capture=defers
        )
        prepared = _prepare(common, request)
        start = _Start(common, directory, request, own_record, prepared, final is not lookup)
        if detach:
            options = [*(["--revision", revision] if revision else []), *(["--untrusted"] * untrusted)]
            _detach(start, [model, *options], lock)
            return
        code = _serve(start)
        directory.end()
    except BaseException as error:
        # The record of a server in the background stays, for example if its report cannot be printed.
        if (record := directory.read()) is None or record.pid == own_record.pid:
            directory.end()
        _show_termination(common, model, getattr(error, "code", None))
        raise
    finally:
        os.close(lock)
    _show_termination(common, model, code)
    raise typer.Exit(code)


def _show_termination(common: Common, model: str, code: object) -> None:
    if code == _TERMINATED:
        common.out.print_note(f"SIGTERM, which coldstart down sends, stopped {model}.")


def _prepare(common: Common, request: "ServeRequest") -> "Preparation":
    """Prepare the fastest start mode, and print why faster modes could not be prepared."""
    from coldstart.launch import planning, preparation

    for note in request.lookup.notes:
        common.out.warn(note)
    # Prepare without the address: it belongs to one server, and a template forks servers for any address. A standby engine
    # captures all graphs, because no client waits for it.
    prepared = preparation.prepare_fastest(
        request.lookup,
        planning.plan(replace(request, listen=(), defer_capture=False)),
        common.out.show_phase,
        request.ready_timeout,
    )
    for failure in prepared.failures:
        common.out.print_note(f"not prepared: {failure}")
    return prepared


def _serve(start: _Start) -> int:
    """Start the server in the foreground, and return its exit code when it exits."""
    from coldstart.launch import planning

    plan = planning.plan(start.request)

    def announce(report: dict[str, Any]) -> None:
        start.record(report, plan)
        _announce(start, plan, report, is_detached=False)

    return _serving.run_server(start.common, start.request, plan, announce)


def _detach(start: _Start, serve_args: list[str], lock: int) -> None:
    """Start the server in the background, where it keeps the lock, and return when it is ready."""
    from coldstart.launch import planning

    common, request, log = start.common, start.request, start.directory.log
    plan = planning.plan(request)
    timeout = request.ready_timeout
    serve_args += ["--on-miss", "warn", "--mode", "auto", "--cache-dir", str(common.cache.root)]
    serve_args += request.listen
    serve_args += ["--capture", _serving.DEFERRED] * request.defer_capture
    serve_args += [] if timeout is None else ["--ready-timeout", str(timeout)]
    flags = (("--offline", common.offline), ("-v", common.out.verbose))
    serve_args += [flag for flag, is_set in flags if is_set]

    def record(pid: int) -> None:
        start.own_record = replace(
            start.own_record, pid=pid, birth=processes.read_identity(pid), log=str(log)
        )
        start.directory.write(start.own_record)

    with _serving.show_start(common, detached=True) as show:
        report = _serving.start_detached(
            [*serve_args, "--", *request.lookup.vllm_args], log, lock, record, show
        )
    start.record(report, plan)
    _announce(start, plan, {**report, "log": str(log)}, is_detached=True)
    common.out.print_note(f"The log of the server is {log}")
    _serving.print_advice(common, request, plan, report)


def _describe_stop(start: _Start, *, is_detached: bool) -> str:
    """Return a line that explains how to stop the server, with or without its template."""
    down = shlex.join(["coldstart", "down", start.request.lookup.model.cli_argument])
    if start.prepared.template is None:
        if is_detached:
            return f"Stop it: {down}"
        return "Stop it: Ctrl-C; with --detach the server runs in the background"
    if is_detached:
        return f"Stop it: {down} --keep-template, or, with its template: {down}"
    return f"Stop it: Ctrl-C, which keeps the template; then, to stop the template: {down}"


def _ensure_bundle(common: Common, lookup: "BundleLookup") -> "BundleLookup":
    """Return the lookup with its bundle, which is built if missing. If the build fails, warn and return `lookup` unchanged."""
    if lookup.bundle is not None:
        common.out.print_note(f"Using the bundle {lookup.bundle.name}:v{lookup.bundle.version}")
        return lookup
    if lookup.untrusted is not None:
        _report_untrusted(common, lookup, lookup.untrusted)
    try:
        return _serving.build_bundle(common, lookup)
    except (ColdstartError, OSError) as error:
        if isinstance(error, CommandFailedError) and error.is_final:
            raise
        hint = getattr(error, "hint", None)
        first, *more = getattr(error, "lines", [str(error)])
        common.out.warn(f"no bundle was built: {first}" + (f" (hint: {hint})" if hint else ""), *more)
        return lookup


def _report_untrusted(common: Common, lookup: "BundleLookup", untrusted: "Bundle") -> None:
    """Warn that a new bundle is built although an untrusted bundle matches.

    Raises:
        NoBundleError: Only the untrusted bundle records the vLLM arguments, so a new bundle would have a different key.
    """
    from coldstart.models import inspection

    error = inspection.build_miss_error(lookup)
    if untrusted.key != lookup.key:
        raise error
    common.out.warn(f"{error.message}; building one (hint: {error.hint})")


def _announce(start: _Start, plan: LaunchPlan, report: dict[str, Any], *, is_detached: bool) -> None:
    common, prepared = start.common, start.prepared
    seconds = time.monotonic() - common.out.started - report["ready_s"]
    preparation = {"mode": prepared.mode, "seconds": round(seconds, 4), "built_bundle": start.built_bundle}
    report = report | {"preparation": preparation | {"is_new": prepared.is_new}}
    _serving.print_start_report(common, report)
    if common.out.format == "text" and (command := _serving.describe_request(report, plan.vllm_args)):
        common.out.print_note(f"Try: {command}")
    common.out.print_note(_describe_stop(start, is_detached=is_detached))


def _require_same_settings(
    common: Common, running: "UpRecord", lookup: "BundleLookup", host: str | None, port: int | None
) -> None:
    """Compare the settings of the running server with the requested ones.

    Settings on the command line and the API key must agree. Differences in the bundle and in defaults cause only a
    warning.

    Raises:
        CommandFailedError: The running server has a different address or setting than the user requests.
    """
    from coldstart.launch import listening, up_records

    vllm_args, url = common.vllm_args, urlsplit(running.url or "")
    host = host if host is not None else vllm_args.get_value("host")
    port = port if port is not None else vllm_args.get_integer("port", 0)
    running_host = str(running.host or url.hostname or "")
    differing = up_records.list_differences(running, lookup)
    is_requested = common.has_typed_args and bool(differing)
    is_requested |= up_records.API_KEY in differing and bool(environment.VLLM_API_KEY.read())
    if host is not None and not listening.is_reachable_at(running_host, str(host)):
        differing.insert(0, f"--host {host}")
        is_requested |= "host" in common.typed_options or vllm_args.contains_flag("host")
    if port not in (0, url.port):
        differing.insert(0, f"--port {port}")
        is_requested |= "port" in common.typed_options or vllm_args.contains_flag("port")
    problem = (
        f"{running.argument} is already up at {running.url} with different settings: {', '.join(differing)}"
    )
    if is_requested:
        raise CommandFailedError(problem, hint=_describe_restart(running))
    if not differing and running.key != lookup.key.digest:
        problem = f"{running.argument} was started before the model, the environment or vLLM changed"
    if differing or running.key != lookup.key.digest:
        common.out.warn(f"{problem} (hint: {_describe_restart(running)})")


def _describe_restart(running: "UpRecord") -> str:
    return f"run `coldstart down {running.argument}`, then `coldstart up`"


def _show_running(common: Common, running: "UpRecord") -> None:
    data = {"url": running.url, "mode": running.mode, "pid": running.pid, "already_up": True}
    common.out.print_result(data | {"log": running.log}, f"{running.url}  {running.mode}, already up")
    if running.log is not None:
        common.out.print_note(f"The log of the server is {running.log}")
