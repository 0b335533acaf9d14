"""Steps that `serve` and `up` share: find the model's bundle, build it, start the server, and report the start."""

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
from typing import TYPE_CHECKING, Annotated, Any

import typer
from coldstart.commands._options import Common
from coldstart.commands._output import table

from coldstart.contract import environment
from coldstart.contract.fallback import Fallback, decode
from coldstart.contract.plan import READY_FD_ENV
from coldstart.errors import CommandFailedError
from coldstart.system import secrets

if TYPE_CHECKING:
    from coldstart.contract.arguments import Arguments
    from coldstart.contract.plan import LaunchPlan
    from coldstart.launch.planning import ServeRequest
    from coldstart.launch.server import Server
    from coldstart.launch.server_process import ServerExitedError
    from coldstart.models.inspection import Lookup
    from coldstart.system.start_progress import Report
    from coldstart.system.timeline import Timeline

SLOW_S = 3.0
"""Shortest time to ready, in seconds, after which a start is called slow."""
# Longest preparation in seconds that the line of a start does not mention.
_SHORT_S = 1.0
Host = Annotated[
    str | None,
    typer.Option(
        "--host", metavar="ADDRESS", help="Address to listen on; default: 127.0.0.1 (this machine only)."
    ),
]
Port = Annotated[
    int | None,
    typer.Option(
        "--port", min=0, max=65535, metavar="N", help="Port to listen on, as for vLLM; default: 8000."
    ),
]
ReadyTimeout = Annotated[
    float | None,
    typer.Option(
        "--ready-timeout",
        metavar="SECONDS",
        help="Abort a start that takes longer than this; default: no limit.",
    ),
]


def find(common: Common, model: str, revision: str | None, *, untrusted: bool) -> "Lookup":
    """Look up what a server is to start from, and print the arguments if they come from the bundle and not from the user."""
    from coldstart.artifacts.bundle import accept_any

    lookup = common.look_up(model, revision, accept_any if untrusted else None, adopts=True)
    if lookup.lender is not None and lookup.vllm_args:
        note_arguments(common, f"{lookup.lender.name}:v{lookup.lender.version}", lookup.vllm_args)
    return lookup


def note_arguments(common: Common, lender: str, arguments: Sequence[str]) -> None:
    """Print the arguments that the bundle `lender` records."""
    common.out.note(f"Using the arguments of {lender}: {shlex.join(arguments)}")


def materialize(common: Common, lookup: "Lookup") -> "Lookup":
    """Build the bundle of the lookup and return the lookup that has it."""
    from coldstart.materialize.materialize import MaterializationPlan
    from coldstart.materialize.options import Options

    MaterializationPlan(lookup, Options()).run(common.out.phase)
    return lookup.refresh()


def run(
    common: Common,
    request: "ServeRequest",
    plan: "LaunchPlan",
    announce: Callable[[dict[str, Any]], None],
    timeline: Path | None = None,
) -> int:
    """Start the server, pass the report of its start to `announce`, show its phases, wait until it ends, return the exit code.

    The phases are a table. `up --detach`, if it started this process, receives the progress and the report, too.
    """
    from coldstart.launch import driver
    from coldstart.system import start_progress

    pipe = int(os.environ.pop(READY_FD_ENV, "-1"))

    def announce_report(server: "Server", recorded: "Timeline") -> None:
        hide.close()
        report = server.document() | {"longest_phase": recorded.find_longest(server.began)}
        with common.out.gather():
            announce(report)
            common.out.detail(*_list_phases(recorded).splitlines())
            advise(common, request, plan, report)
        if pipe >= 0:
            os.set_blocking(pipe, True)
            with suppress(OSError), os.fdopen(pipe, "w", encoding="utf-8") as waiting:
                waiting.write(json.dumps(report) + "\n")

    with ExitStack() as hide:
        if pipe >= 0:
            os.set_blocking(pipe, False)
            request = replace(request, on_progress=lambda one: start_progress.write(pipe, one))
        else:
            request = replace(request, on_progress=hide.enter_context(show_start(common)))
        return driver.run(request, plan, announce_report, timeline)


def _list_phases(recorded: "Timeline") -> str:
    """Return a table of the phases of a start, in seconds since its first one."""
    spans = sorted(recorded.describe_spans(), key=itemgetter("start_s"))
    rows = [(one["track"], one["name"], f"{one['start_s']:.3f}", f"{one['end_s']:.3f}") for one in spans]
    return table(("process", "phase", "begins", "ends (s)"), rows)


@contextmanager
def show_start(common: Common, *, detached: bool = False) -> "Iterator[Report]":
    """Show that a server starts; the yielded function shows the progress of its start.

    Without --progress, show it only on a terminal that does not show the server's log, as that of a detached one.
    """
    from coldstart.system.start_progress import ProgressText, ignore

    if common.out.progress == "auto" and not (detached and common.out.is_animated()):
        yield ignore
        return
    with common.out.phase("start the server") as step:
        yield lambda progress: step(ProgressText(progress.describe()))


def advise(common: Common, request: "ServeRequest", plan: "LaunchPlan", report: Mapping[str, Any]) -> None:
    """Warn about a server that others can use, and name what would make the next start faster."""
    from coldstart.launch import listening

    if exposure := listening.describe_exposure(plan.vllm_args, os.environ):
        common.out.warn(exposure)
    if advice := advise_faster(request.lookup, report["ready_s"], decode(report["absent"])):
        common.out.note(advice)


def advise_faster(lookup: "Lookup", ready_s: float, unavailable: Iterable[Fallback]) -> str | None:
    """Return the command that prepares the fastest unavailable start mode, in one line; None after a fast start."""
    hints = [(one.stage, one.hint) for one in unavailable if one.hint and one.hint.startswith("coldstart ")]
    if ready_s < SLOW_S or not hints:
        return None
    mode, command = hints[0]
    if lookup.vllm_args and command.startswith("coldstart materialize "):
        command += " -- " + shlex.join(secrets.arguments(lookup.vllm_args))
    return f"For a faster next start ({mode}): {command}"


def show(common: Common, report: dict[str, Any]) -> None:
    """Print the fallbacks of a start, then URL, mode and time in one line, with the longest phase of a slow start."""
    for fallback in decode(report["fallbacks"]):
        common.out.warn(str(fallback))
    ready = f"{report['url']}  {report['mode']}, ready in {report['ready_s']:.2f} s"
    more = "" if common.out.verbose else "; -v shows all phases"
    common.out.result(report, lambda: f"{ready}{_describe_whole(report)}{_describe_longest(report, more)}")


def _describe_longest(report: Mapping[str, Any], more: str) -> str:
    """Return the longest phase of a slow start, nothing after a fast one."""
    longest = report.get("longest_phase")
    if longest is None or report["ready_s"] < SLOW_S:
        return ""
    return f"; {longest[0]} took {longest[1]:.1f} s of it{more}"


def describe_request(report: Mapping[str, Any], vllm_args: "Arguments") -> str | None:
    """Return a command that sends a request to the server, None if it generates no tokens or curl needs more to reach it."""
    from coldstart.launch import listening

    if not report["tokens"] or not report["url"].startswith("http://"):
        return None
    name = vllm_args.value("served_model_name")
    name = name[0] if isinstance(name, list) else str(name)
    headers = ["Content-Type: application/json"]
    if listening.requires_key(vllm_args, os.environ):
        headers.append("Authorization: Bearer KEY")
    body = json.dumps({"model": name, "prompt": "Once upon a time", "max_tokens": 8})
    options = [word for header in headers for word in ("-H", header)]
    return shlex.join(["curl", f"{report['url']}/v1/completions", *options, "-d", body])


def _describe_whole(report: Mapping[str, Any]) -> str:
    """Return the time of the whole command `up` with what it did before the start, nothing if that was short."""
    before = report.get("preparation")
    if before is None or before["seconds"] <= _SHORT_S:
        return ""
    done = [
        *(["the build of the bundle"] if before["built_bundle"] else []),
        *([f"the preparation of {before['mode']}"] if before["is_new"] else []),
    ]
    detail = f"with {' and '.join(done)}" if done else "in all"
    return f", {before['seconds'] + report['ready_s']:.1f} s {detail}"


# Its options come from the command alone, not from the environment.
_OPTIONS = f"{environment.PREFIX}_SERVE_"


def start_detached(
    words: Sequence[str], log: Path, lock: int, started: Callable[[int], None], on_progress: "Report"
) -> Mapping[str, Any]:
    """Run `coldstart serve WORDS` in a new session and return the report of its start.

    Args:
        words: Arguments of `serve`.
        log: File for its output.
        lock: Descriptor of a lock that the process holds as long as it runs.
        started: Called with its PID.
        on_progress: Called with each report of the start's progress.

    Raises:
        CommandFailedError: The process ends before the server is ready.
    """
    from coldstart.launch import server_process
    from coldstart.launch.server import end_on_error

    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    reader, writer = os.pipe()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OPTIONS)}
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "coldstart.commands.cli", "serve", "--format", "json", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=kept | {READY_FD_ENV: str(writer)},
            pass_fds=(writer, lock),
            start_new_session=True,
        )
    finally:
        os.close(output)
        os.close(writer)
    child = server_process.Child(process)
    try:
        # Ctrl-C included: otherwise the server would start without a command that awaits it.
        with end_on_error(child):
            started(process.pid)
            return server_process.acknowledged(child, reader, time.monotonic(), None, on_progress).report
    except server_process.ServerExitedError as died:
        raise _explain(died, log) from died


def _explain(died: "ServerExitedError", log: Path) -> CommandFailedError:
    if died.code == 128 + signal.SIGTERM:
        return CommandFailedError(
            "the server was stopped by SIGTERM, which coldstart down sends, before it was ready"
        )
    from coldstart.system.proc import exits

    tail, error = exits.read_end(log).splitlines(), dict[str, Any]()
    with suppress(ValueError, LookupError):  # a process that was killed has written no error
        error = json.loads(log.read_text(errors="replace").splitlines()[-1])
        tail = tail[:-1]
    lines = [*error.get("error", died.message).splitlines(), f"The end of {log}:", *tail]
    return CommandFailedError(lines, hint=error.get("hint"), exit_code=error.get("exit_code"))
