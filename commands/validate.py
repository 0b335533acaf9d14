"""Check bundles: manifest, digests, a start, and answers compared with stock vLLM.

Levels: manifest and checksum need neither torch nor vllm. load starts a server that generates a token. replay compares
its greedy tokens, alone and with concurrent requests, with a stock start. A model is looked up with the vLLM arguments
after --, as serve does. A reference starts with the arguments of its bundle. Exit code 1 if a finding reaches
--fail-level.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer
from coldstart.commands._completion import complete_model
from coldstart.commands._options import Common, Revision
from coldstart.commands._options import command as declare
from coldstart.commands._output import count

from coldstart import api
from coldstart.api import Source, ValidationReport, ValidationRequest
from coldstart.errors import ColdstartError, CommandFailedError
from coldstart.validate import renderers
from coldstart.validate.checks import FailLevel, Level
from coldstart.validate.validation import parse_replay

ReportFormat = Annotated[
    Literal["text", "json", "junit", "github"],
    typer.Option("--format", help="Format of the result."),
]
RENDERERS = {"junit": renderers.render_junit, "github": renderers.render_github}


@declare(takes_vllm_args=True)
def command(
    common: Common,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL|REF...", help="Models or bundle references.", autocompletion=complete_model
        ),
    ],
    level: Annotated[
        Level, typer.Option("--level", help="How deep to check; a level includes those before it.")
    ] = "checksum",
    against: Annotated[
        Literal["this"] | None,
        typer.Option(
            "--against", help="Also check that the bundle fits this machine; the only value is this."
        ),
    ] = None,
    fail_level: Annotated[
        FailLevel, typer.Option("--fail-level", help="Minimum severity that makes the command fail.")
    ] = "error",
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="DIR",
            help="Directory of the model, for load and replay of a bundle that was built from a directory.",
        ),
    ] = None,
    revision: Revision = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="Prompts of replay, one per line; default: eight built-in prompts.",
        ),
    ] = None,
    concurrency: Annotated[
        str,
        typer.Option(
            "--concurrency",
            metavar="N,...",
            help="Numbers of concurrent requests to try at level replay; 1 is always included.",
        ),
    ] = "1,8",
    max_tokens: Annotated[
        int,
        typer.Option(
            "--max-tokens", metavar="N", min=1, help="Number of tokens per response at level replay."
        ),
    ] = 64,
) -> None:
    """Check every bundle and print the findings; fail if a finding reaches --fail-level."""
    source = Source(common.vllm_args, model, revision, common.offline, common.cache)
    replay = parse_replay(prompts, concurrency, max_tokens)
    request = ValidationRequest(words, level, source, replay, against is not None)
    with common.out.phase(f"validating {count(len(words), 'bundle')} at level {level}"):
        try:
            reports = api.validate_all(request)
        except ColdstartError as error:
            # A CI system that finds no file would report a broken job instead of the reason.
            if str(common.out.format) == "junit":
                text = renderers.render_junit_error(words, level, error)
                replace(common.out, format="text").result({}, text)
            raise
    if not common.vllm_args and revision is None:
        for word, report in zip(words, reports, strict=True):
            common.note_version(word, report.ref)
    _show(common, reports, fail_level)
    bad = [report.ref for report in reports if report.fails(fail_level)]
    if bad:
        raise CommandFailedError(
            f"{len(bad)} of {len(reports)} failed: {', '.join(bad)}", hint="see the hint of each finding"
        )
    common.out.success(f"{len(reports)} valid", then=common.format_command("inspect", words[0]))


def _show(common: Common, reports: list[ValidationReport], fail_level: FailLevel) -> None:
    form = str(common.out.format)
    out = common.out if form == "json" else replace(common.out, format="text")
    document = renderers.build_document(reports, fail_level)
    render = RENDERERS.get(form, renderers.render_text)
    out.result(document, lambda: render(reports, fail_level))


def _with_report_formats(function: Callable[..., None]) -> Callable[..., None]:
    # The shared --format knows text and json; here CI systems' own forms are results as well.
    declared = inspect.signature(function)
    wider = [
        parameter.replace(annotation=ReportFormat) if name == "format" else parameter
        for name, parameter in declared.parameters.items()
    ]
    function.__signature__ = declared.replace(parameters=wider)  # type: ignore[attr-defined]
    function.__annotations__["format"] = ReportFormat
    return function


command = _with_report_formats(command)
