"""Steps that `serve` and `up` share: find or build the model's bundle, start the server, and report the start."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer
from coldstart.commands._options import Common, require_positive
from coldstart.commands._output import format_table

from coldstart.contract import environment
from coldstart.contract.arguments import Arguments
from coldstart.contract.fallback import Fallback, decode_fallbacks
from coldstart.contract.plan import READY_FD_ENV, LaunchPlan
from coldstart.errors import CommandFailedError
from coldstart.system import secrets, start_progress
from coldstart.system.start_progress import ProgressText, Report, ignore_progress
from coldstart.system.timeline import Timeline

if TYPE_CHECKING:
    from coldstart.launch.planning import ServeRequest
    from coldstart.launch.server import Server
    from coldstart.launch.server_process import ServerExitedError
    from coldstart.models.inspection import BundleLookup

SLOW_START_S = 3.0
"""Time to ready, in seconds, from which a start counts as slow."""
# Preparations up to this many seconds are not mentioned in the report of a start.
_SHORT_PREPARATION_S = 1.0
Host = Annotated[
    str | None,
    typer.Option(
        "--host", metavar="ADDRESS", help="Address to listen on; default: 127.0.0.1 (this machine only)."
    ),
]
Port = Annotated[
    int | None,
    typer.Option(
        "--port",
        min=0,
        max=65535,
        metavar="N",
        help="Port to listen on; 0 selects a free port; default: 8000.",
    ),
]
ReadyTimeout = Annotated[
    float | None,
    typer.Option(
        "--ready-timeout",
        callback=require_positive,
        metavar="SECONDS",
        help="Abort a start that takes longer than this many seconds; default: no limit.",
    ),
]
DEFERRED = "deferred"
Capture = Annotated[
    Literal["all", "deferred"],
    typer.Option(
        "--capture",
        help="When to capture CUDA graphs: all (before the server is ready), or deferred (most of them after the server is"
        " ready).",
    ),
]


def look_up_model(common: Common, model: str, revision: str | None, *, untrusted: bool) -> "BundleLookup":
    """Look up the model, its key and its bundle, and print the vLLM arguments if the bundle supplies them."""
    from coldstart.artifacts.bundle import accept_any

    lookup = common.look_up(model, revision, accept_any if untrusted else None, adopts=True)
    if lookup.arguments_bundle is not None and lookup.vllm_args:
        print_adopted_arguments(
            common, f"{lookup.arguments_bundle.name}:v{lookup.arguments_bundle.version}", lookup.vllm_args
        )
    return lookup


def print_adopted_arguments(common: Common, lender: str, arguments: Sequence[str]) -> None:
    """Print the vLLM arguments that a server adopts from the bundle `lender`."""
    common.out.print_note(f"Using the arguments of {lender}: {shlex.join(arguments)}")


def build_bundle(common: Common, lookup: "BundleLookup") -> "BundleLookup":
    """Build the missing bundle, and return the lookup with it."""
    from coldstart.materialize.materialize import MaterializationPlan
    from coldstart.materialize.options import Options

    MaterializationPlan(lookup, Options()).run(common.out.show_phase)
    return lookup.refresh()


def run_server(
    common: Common,
    request: "ServeRequest",
    plan: LaunchPlan,
    announce: Callable[[dict[str, Any]], None],
    timeline: Path | None = None,
) -> int:
    """Start the server, pass the report of its start to `announce`, and return its exit code when it exits.

    With -v, print a table of the start's phases. If `up --detach` started this process, send it the progress and the report.
    """
    from coldstart.launch import driver

    pipe = int(os.environ.pop(READY_FD_ENV, "-1"))

    def announce_report(server: "Server", recorded: Timeline) -> None:
        hide.close()
        report = server.document() | {"longest_phase": recorded.find_longest(server.began)}
        announce(report)
        common.out.print_details(*_format_phases(recorded).splitlines())
        print_advice(common, request, plan, report)
        if pipe >= 0:
            os.set_blocking(pipe, True)
            # If `up` was killed, this raises an error, which stops the server: no record has its URL.
            with os.fdopen(pipe, "w", encoding="utf-8") as parent:
                parent.write(json.dumps(report) + "\n")

    with ExitStack() as hide:
        if pipe >= 0:
            os.set_blocking(pipe, False)
            request = replace(request, on_progress=lambda one: start_progress.write_progress(pipe, one))
        else:
            request = replace(request, on_progress=hide.enter_context(show_start(common)))
        return driver.run_server(request, plan, announce_report, timeline)


def _format_phases(recorded: Timeline) -> str:
    """Return a table of the phases of a start, with times in seconds since the first phase began."""
    spans = sorted(recorded.describe_spans(), key=itemgetter("start_s"))
    rows = [(span["track"], span["name"], f"{span['start_s']:.3f}", f"{span['end_s']:.3f}") for span in spans]
    return format_table(("process", "phase", "begins", "ends (s)"), rows)


@contextmanager
def show_start(common: Common, *, detached: bool = False) -> "Iterator[Report]":
    """Show that a server is starting, and yield a function that shows its progress.

    Without --progress, show progress only for a detached server on a terminal, where no server log would interrupt it.
    """
    if common.out.progress == "auto" and not (detached and common.out.is_animated()):
        yield ignore_progress
        return
    with common.out.show_phase("start the server") as step:
        yield lambda progress: step(ProgressText(progress.describe()))


def print_advice(
    common: Common, request: "ServeRequest", plan: LaunchPlan, report: Mapping[str, Any]
) -> None:
    """Warn if other machines or users can use the server, and print the command that makes the next start faster."""
    from coldstart.launch import listening

    if exposure := listening.describe_exposure(plan.vllm_args, os.environ):
        common.out.warn(exposure)
    if advice := describe_faster_start(request.lookup, report["ready_s"], decode_fallbacks(report["absent"])):
        common.out.print_note(advice)


def describe_faster_start(
    lookup: "BundleLookup", ready_s: float, unavailable: Iterable[Fallback]
) -> str | None:
    """Return a line with the command that prepares the fastest unavailable start mode, or None if the start was fast."""
    hints = [(one.stage, one.hint) for one in unavailable if one.hint and one.hint.startswith("coldstart ")]
    if ready_s < SLOW_START_S or not hints:
        return None
    mode, command = hints[0]
    if lookup.vllm_args and command.startswith("coldstart materialize "):
        command += " -- " + shlex.join(secrets.redact_arguments(lookup.vllm_args))
    return f"For a faster next start ({mode}): {command}"


def print_start_report(common: Common, report: dict[str, Any]) -> None:
    """Print the fallbacks of a start, then its URL, mode and seconds, and the longest phase if the start was slow."""
    for fallback in decode_fallbacks(report["fallbacks"]):
        common.out.warn(str(fallback))
    ready = f"{report['url']}  {report['mode']}, ready in {report['ready_s']:.2f} s"
    more = "" if common.out.verbose else "; -v shows all phases"
    common.out.print_result(
        report, lambda: f"{ready}{_describe_total_time(report)}{_describe_longest_phase(report, more)}"
    )


def _describe_longest_phase(report: Mapping[str, Any], more: str) -> str:
    """Return the longest phase of a slow start, or an empty string if the start was fast."""
    longest = report.get("longest_phase")
    if longest is None or report["ready_s"] < SLOW_START_S:
        return ""
    return f"; {longest[0]} took {longest[1]:.1f} s of it{more}"


def describe_request(report: Mapping[str, Any], vllm_args: Arguments) -> str | None:
    """Return a curl command that requests a completion, or None for a pooling model or a URL that is not plain HTTP."""
    from coldstart.launch import listening

    if not report["tokens"] or not report["url"].startswith("http://"):
        return None
    name = vllm_args.get_value("served_model_name")
    name = name[0] if isinstance(name, list) else str(name)
    headers = ["Content-Type: application/json"]
    if listening.requires_api_key(vllm_args, os.environ):
        headers.append("Authorization: Bearer KEY")
    body = json.dumps({"model": name, "prompt": "Once upon a time", "max_tokens": 8})
    options = [argument for header in headers for argument in ("-H", header)]
    return shlex.join(["curl", f"{report['url']}/v1/completions", *options, "-d", body])


def _describe_total_time(report: Mapping[str, Any]) -> str:
    """Return the total seconds of `up` and of its steps before the start, or an empty string if the steps were short."""
    preparation = report.get("preparation")
    if preparation is None or preparation["seconds"] <= _SHORT_PREPARATION_S:
        return ""
    steps = [
        *(["the build of the bundle"] if preparation["built_bundle"] else []),
        *([f"the preparation of {preparation['mode']}"] if preparation["is_new"] else []),
    ]
    detail = f"with {' and '.join(steps)}" if steps else "in all"
    return f", {preparation['seconds'] + report['ready_s']:.1f} s {detail}"


# Variables of the options of `serve`. A detached server takes its options from its command line alone.
_SERVE_VARIABLES = f"{environment.PREFIX}_SERVE_"


def start_detached(
    serve_args: Sequence[str], log: Path, lock: int, on_spawn: Callable[[int], None], on_progress: Report
) -> Mapping[str, Any]:
    """Run `coldstart serve` in a new session, wait until the server is ready, and return the report of its start.

    Args:
        serve_args: Arguments of `coldstart serve`.
        log: File that receives stdout and stderr of the process.
        lock: File descriptor of a lock that the process holds while it runs.
        on_spawn: Called with the PID of the process.
        on_progress: Called with each report of the start's progress.

    Raises:
        CommandFailedError: The process exits before the server is ready.
    """
    from coldstart.launch import server_process
    from coldstart.launch.server import stop_on_error

    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    reader, writer = os.pipe()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_SERVE_VARIABLES)}
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "coldstart.commands.cli", "serve", "--format", "json", *serve_args],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=inherited | {READY_FD_ENV: str(writer)},
            pass_fds=(writer, lock),
            start_new_session=True,
        )
    finally:
        os.close(output)
        os.close(writer)
    child = server_process.ChildServer(process)
    try:
        # On Ctrl-C too: otherwise, the server would continue to start although no command waits for it.
        with stop_on_error(child):
            on_spawn(process.pid)
            return server_process.await_readiness(child, reader, time.monotonic(), None, on_progress).report
    except server_process.ServerExitedError as exit_error:
        raise _describe_exit(exit_error, log) from exit_error


def _describe_exit(exit_error: "ServerExitedError", log: Path) -> CommandFailedError:
    if exit_error.code == 128 + signal.SIGTERM:
        return CommandFailedError(
            "SIGTERM, which coldstart down sends, stopped the server before it was ready"
        )
    from coldstart.system.proc import exits

    tail, error = exits.read_log_tail(log).splitlines(), dict[str, Any]()
    with suppress(ValueError, LookupError):  # a killed process has not written its error
        last = log.read_text(errors="replace").splitlines()[-1]
        error = msgspec.json.decode(last, type=dict[str, Any])
        tail = tail[:-1]
    lines = [*error.get("error", exit_error.message).splitlines(), f"Last lines of {log}:", *tail]
    return CommandFailedError(lines, hint=error.get("hint"), exit_code=error.get("exit_code"))
