"""Start vLLM's OpenAI-compatible server for a model from its bundle, by the fastest way there is."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from coldstart.commands._options import Common, Model, Revision, Untrusted
from coldstart.commands._options import command as declare

from coldstart.contract.fallback import from_json
from coldstart.errors import UsageError
from coldstart.launch import modes
from coldstart.scheduling.settings import SchedulerSettings
from coldstart.system import secrets

if TYPE_CHECKING:
    from coldstart.artifacts.bundle import Trust

    from coldstart.models.inspection import Lookup

    Mode = str
else:
    Mode = Literal[(modes.AUTO, *modes.names())]
OnMiss = Literal["fail", "warn", "materialize"]


@declare(takes_vllm_args=True, chooses_scheduler=True)
def command(
    common: Common,
    choice: SchedulerSettings,
    model: Model,
    mode: Annotated[
        Mode,
        typer.Option(
            "--mode",
            help="Start mode; auto takes the first that can be used, in this order.",
        ),
    ] = modes.AUTO,
    on_miss: Annotated[OnMiss, typer.Option("--on-miss", help="What to do when no bundle fits.")] = "fail",
    host: Annotated[
        str | None,
        typer.Option(
            "--host", metavar="ADDRESS", help="Address to listen at, as for vLLM; default: every one."
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", metavar="N", help="Port to listen at, as for vLLM; default: 8000.")
    ] = None,
    revision: Revision = None,
    ready_timeout: Annotated[
        float | None,
        typer.Option(
            "--ready-timeout", metavar="SECONDS", help="Give up a start that takes longer; default: never."
        ),
    ] = None,
    ready_file: Annotated[
        Path | None,
        typer.Option("--ready-file", metavar="FILE", help="Write how it came up, as JSON, once ready."),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option("--timeline", metavar="FILE", help="Write start and swaps as Chrome trace-event JSON."),
    ] = None,
    weights_from: Annotated[
        str | None,
        typer.Option(
            "--weights-from",
            metavar="SOURCE",
            help="Fetch the weights meanwhile from http(s)://..., s3://..., hf://REPO@REV or a directory.",
        ),
    ] = None,
    fetch_rest: Annotated[
        bool,
        typer.Option(
            "--fetch-rest", help="Once ready, fetch what only other pipeline ranks need, in the background."
        ),
    ] = False,
    require_signature: Annotated[
        bool, typer.Option("--require-signature", help="Refuse a bundle that nobody trusted has signed.")
    ] = False,
    untrusted: Untrusted = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be started.")] = False,
) -> None:
    """Look up, start, say when it is ready, and stay until it ends."""
    from coldstart.artifacts.bundle import anyone

    from coldstart.launch import ladder, planning, prediction, supervise
    from coldstart.launch.request import ServeRequest
    from coldstart.launch.scheduler import check
    from coldstart.system.drawing import draw
    from coldstart.system.recording import recording

    for file in filter(None, (ready_file, timeline)):
        _require_place(file)
    listen = [*(["--host", host] if host else []), *(["--port", str(port)] if port is not None else [])]
    # Before anything is looked up: what was typed wrongly is said at once.
    check(choice, common.vllm_args)
    request = ServeRequest(
        _looked_up(
            common, model, revision, on_miss, anyone if untrusted else None, remote=weights_from is not None
        ),
        listen,
        mode=mode,
        without_bundle=on_miss == "warn",
        ready_timeout=ready_timeout,
        require_signature=require_signature,
        weights_from=weights_from,
        fetch_rest=fetch_rest,
        scheduler=choice,
    )
    plan = planning.plan(request)
    for note in request.lookup.notes:
        common.out.warn(note)
    if dry_run:
        planned = {
            "url": planning.url(plan),
            "bundle": request.lookup.bundle.ref if request.lookup.bundle else None,
            **plan.document(),
        }
        planned["vllm_args"] = secrets.arguments(plan.vllm_args)
        common.out.result(planned, lambda: json.dumps(secrets.document(planned), indent=2))
        return
    with recording(timeline, wanted=common.out.verbose) as recorded:
        started = ladder.start(request, plan)
        with supervise.end_on_error(started.running.process):
            report = started.document() | {"url": planning.url(plan)}
            recorded.started()
            report["predicted"] = prediction.document(request, started, recorded.timeline.phases())
            _say(common, report, ready_file)
            common.out.detail(draw(recorded.timeline))
            code = supervise.stay(started.running.process)
    raise typer.Exit(code)


def _looked_up(
    common: Common,
    model: str,
    revision: str | None,
    on_miss: OnMiss,
    accepts: "Trust | None",
    *,
    remote: bool,
) -> "Lookup":
    """The look-up, after materializing what is missing where that was asked for."""
    lookup = common.look_up(model, revision, accepts)
    if remote:
        lookup = lookup.without_weights()
    if lookup.bundle is not None or on_miss != "materialize":
        return lookup
    from coldstart.materialize import materialize
    from coldstart.materialize.options import Options

    materialize.materialize(lookup, Options(), common.out.phase)
    return lookup.refresh()


def _say(common: Common, report: dict[str, Any], ready_file: Path | None) -> None:
    for fallback in from_json(report["fallbacks"]):
        common.out.warn(str(fallback))
    if ready_file:
        _write(ready_file, json.dumps(secrets.document(report)))
    common.out.result(report, lambda: _ready(report))


def _ready(report: Mapping[str, Any]) -> str:
    predicted = report["predicted"]
    beside = f" (predicted {predicted['ttft_s']:.2f} s)" if predicted else ""
    return f"{report['url']}  {report['mode']}, ready in {report['ready_s']:.2f} s{beside}"


def _require_place(file: Path) -> None:
    # Asked before the start: a server that came up must not end for want of a directory.
    if not os.access(file.absolute().parent, os.W_OK):
        raise UsageError(
            f"{file} cannot be written.", hint=f"mkdir -p {file.absolute().parent}, or name another file"
        )


def _write(path: Path, text: str) -> None:
    # Whoever waits for the file must never see half of it.
    from coldstart.artifacts.files import replacing

    with replacing(path.absolute(), mode=0o600, durable=False) as file:
        file.write(text.encode())
