"""Start vLLM's OpenAI-compatible server from the bundle of a model, with the fastest available start mode."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from coldstart.artifacts.errors import translate_os_errors
from coldstart.artifacts.files import open_replacement
from coldstart.commands import _serving
from coldstart.commands._options import Common, Model, Revision, Untrusted
from coldstart.commands._options import command as declare
from coldstart.commands._output import require_writable

from coldstart.contract.fallback import decode_fallbacks, encode
from coldstart.contract.plan import LaunchPlan
from coldstart.launch import modes
from coldstart.scheduling.settings import SchedulerSettings
from coldstart.system import secrets
from coldstart.system.dry_run import find_directory

if TYPE_CHECKING:
    from coldstart.launch.planning import ServeRequest

    Mode = str
else:
    Mode = Literal[(modes.AUTO, *modes.list_mode_names())]
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
            help="Start mode; `auto` selects the first available mode in the listed order.",
        ),
    ] = modes.AUTO,
    on_miss: Annotated[
        OnMiss,
        typer.Option(
            "--on-miss",
            help="If there is no matching bundle: fail, start stock vLLM with a warning, or build a bundle first.",
        ),
    ] = "fail",
    host: _serving.Host = None,
    port: _serving.Port = None,
    revision: Revision = None,
    ready_timeout: _serving.ReadyTimeout = None,
    ready_file: Annotated[
        Path | None,
        typer.Option(
            "--ready-file",
            metavar="FILE",
            help="Write the start mode, times and fallbacks to this file as JSON when the server is ready.",
        ),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            "--timeline",
            metavar="FILE",
            help="Write a timeline of the start to this file as Chrome trace-event JSON.",
        ),
    ] = None,
    weights_from: Annotated[
        str | None,
        typer.Option(
            "--weights-from",
            metavar="SOURCE",
            help="Where to fetch the weights from: http(s)://..., s3://..., hf://REPO@REV or a directory; or `preload` to map "
            "the weights that a `vllm preload` daemon holds on the GPU. Default: the model's own directory or repository.",
        ),
    ] = None,
    capture: _serving.Capture = "all",
    require_signature: Annotated[
        bool, typer.Option("--require-signature", help="Fail if the bundle has no trusted signature.")
    ] = False,
    untrusted: Untrusted = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print the start mode, the bundle and the URL without starting a server.",
        ),
    ] = False,
) -> None:
    """Start the server, report when it is ready, and wait until it exits."""
    from coldstart.launch import listening, planning
    from coldstart.launch.planning import ServeRequest
    from coldstart.launch.scheduler import check_scheduler

    for file in filter(None, (ready_file, timeline)):
        require_writable(file)
    # Report wrong options before any lookup.
    check_scheduler(choice, common.vllm_args)
    lookup = _serving.look_up_model(common, model, revision, untrusted=untrusted)
    lookup = lookup.accept_nearest_without_weights() if weights_from is not None else lookup
    check_scheduler(choice, lookup.vllm_args)
    listen = listening.build_address_arguments(host, port, lookup.vllm_args)
    if not dry_run:
        listening.require_usable_address(lookup.vllm_args, listen)
    materializes = lookup.bundle is None and on_miss == "materialize"
    request = ServeRequest(
        lookup if dry_run or not materializes else _serving.build_bundle(common, lookup),
        listen,
        mode=mode,
        without_bundle=on_miss == "warn" or (dry_run and materializes),
        ready_timeout=ready_timeout,
        require_signature=require_signature,
        weights_from=weights_from,
        defer_capture=capture == _serving.DEFERRED,
        scheduler=choice,
    )
    plan = planning.plan(request)
    for note in request.lookup.notes:
        common.out.warn(note)
    if dry_run:
        planned = _describe_plan(request, plan) | {"materializes": materializes}
        where = (
            ", at all addresses of this machine" if listening.listens_at_every_address(plan.vllm_args) else ""
        )
        common.out.print_result(planned, lambda: _format_plan(planned, where))
        if exposure := listening.describe_exposure(plan.vllm_args, os.environ):
            common.out.warn(exposure)
        return

    def announce(report: dict[str, Any]) -> None:
        if ready_file:
            _write_file(ready_file, json.dumps(secrets.redact_document(report)))
        _serving.print_start_report(common, report)

    raise typer.Exit(_serving.run_server(common, request, plan, announce, timeline=timeline))


def _describe_plan(request: "ServeRequest", plan: LaunchPlan) -> dict[str, Any]:
    from coldstart.launch import ladder
    from coldstart.launch.listening import find_url
    from coldstart.models import resolution

    bundle, document = request.lookup.bundle, plan.document()
    temporary, models = str(find_directory()), str(request.lookup.cache.models)
    mode, skipped = ladder.find_planned_mode(request, plan)
    if request.mode != modes.AUTO:
        document["fallbacks"] += encode(skipped)
    return {
        "mode": mode,
        "bundle": bundle.ref if bundle else None,
        "version": bundle.version if bundle else None,
        "url": find_url(plan.vllm_args),
        **document,
        "absent": encode(skipped) if request.mode == modes.AUTO else [],
        "downloads": resolution.list_missing_files(request.lookup.model, weights=plan.weights_from is None),
        "vllm_args": [word.replace(temporary, models) for word in secrets.redact_arguments(plan.vllm_args)],
    }


def _format_plan(planned: Mapping[str, Any], where: str) -> str:
    no_bundle = "none; would be built first" if planned["materializes"] else "none"
    name = (planned["bundle"] or no_bundle).partition("@")[0]
    bundle = f"{name}:v{planned['version']}" if planned["bundle"] else no_bundle
    fallbacks = [f"fallback  {fallback}" for fallback in decode_fallbacks(planned["fallbacks"])]
    if planned["downloads"]:
        fallbacks.append(f"download  {', '.join(planned['downloads'])}")
    return "\n".join(
        [f"mode    {planned['mode']}", f"bundle  {bundle}", f"url     {planned['url']}{where}", *fallbacks]
    )


def _write_file(path: Path, text: str) -> None:
    # A program that waits for the file must not read a partial one.
    writing = translate_os_errors(f"writing {path}")
    with writing, open_replacement(path.absolute(), mode=0o600, durable=False) as file:
        file.write(text.encode())
