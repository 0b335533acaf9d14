"""Check bundles: what they declare, every byte, that they start, that they answer as plain vLLM does.

Levels: manifest, checksum (neither needs torch or vllm), load (a server starts and gives a token), replay
(its greedy tokens, alone and with many requests at once, are those of an ordinary vLLM start). A model is looked up
with the arguments of vLLM that follow --, as serve does; a reference is started with those that it was made with.
Exit 1 when something at --fail-level was found.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer
from coldstart.commands._export import Exports, Result, give
from coldstart.commands._options import Common, Revision
from coldstart.commands._options import command as declare
from coldstart.commands._output import public

from coldstart.errors import CommandFailedError
from coldstart.validate import renderers, sarif
from coldstart.validate.checks import FailLevel, Level, ValidationReport
from coldstart.validate.subject import Source
from coldstart.validate.validation import ValidationRequest, check_request, parse_replay, run

ReportFormat = Annotated[
    Literal["text", "json", "junit", "github", "sarif"], typer.Option("--format", help="Form of the result.")
]
RENDERERS = {
    "text": renderers.text,
    "junit": renderers.junit,
    "github": renderers.github,
    "sarif": sarif.render,
}


@declare(takes_vllm_args=True, exports=True)
def command(
    common: Common,
    exports: Exports,
    words: Annotated[
        list[str], typer.Argument(metavar="MODEL|REF...", help="Models, or references of bundles, to check.")
    ],
    level: Annotated[Level, typer.Option("--level", help="How far to go.")] = "checksum",
    against: Annotated[
        str | None, typer.Option("--against", metavar="host|FILE", help="A machine it has to fit.")
    ] = None,
    fail_level: Annotated[FailLevel, typer.Option("--fail-level", help="What makes it fail.")] = "error",
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="DIR",
            help="The model of a bundle that was made from a directory; for load and replay.",
        ),
    ] = None,
    revision: Revision = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help='What replay asks: a prompt a line, or *.jsonl with {"prompt": ...} a line; else eight of our own.',
        ),
    ] = None,
    concurrency: Annotated[
        str,
        typer.Option(
            "--concurrency", metavar="N,...", help="Requests at once, in replay; alone is always compared."
        ),
    ] = "1,8",
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", min=1, help="Length of each answer, in replay.")
    ] = 64,
    repair: Annotated[bool, typer.Option("--repair", help="Mend bad blobs first.")] = False,
    repair_from: Annotated[
        list[str] | None,
        typer.Option("--repair-from", metavar="ADDRESS", help="Where good blobs are; implies --repair."),
    ] = None,
) -> None:
    """Check every bundle, show the findings, fail where there are any that count."""
    source = Source(common.vllm_args, model, revision, common.offline, common.cache)
    replay = parse_replay(prompts, concurrency, max_tokens)
    request = ValidationRequest(words, level, against, repair, repair_from or (), source, replay)
    check_request(request)
    with common.out.phase(f"validating {len(words)} bundle{'s' if len(words) > 1 else ''} at level {level}"):
        reports = run(common.store(), request)
    _show(common, exports, reports, fail_level)
    bad = [report.ref for report in reports if report.fails(fail_level)]
    if bad:
        raise CommandFailedError(
            f"{len(bad)} of {len(reports)} failed: {', '.join(bad)}", hint="see the hint of each finding"
        )
    common.out.success(f"{len(reports)} valid", then=common.again("inspect", words[0]))


def _show(common: Common, exports: Exports, reports: list[ValidationReport], fail_level: FailLevel) -> None:
    form, document = str(common.out.format), public(renderers.document(reports, fail_level))
    result = Result.from_rows("Validation", document, renderers.COLUMNS, renderers.rows(document))
    out = common.out if form == "json" else replace(common.out, format="text")
    give(out, exports, result, lambda: RENDERERS[form](reports, fail_level))


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
