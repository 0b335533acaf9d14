"""Check bundles: the manifest, the digests, a start, and the generated tokens compared with stock vLLM.

Levels: manifest and checksum need neither torch nor vllm. load starts a server and generates a token. replay compares the
greedy tokens of single and concurrent requests with those of a stock vLLM server. A model is looked up with the vLLM arguments
after --, as serve does. A bundle reference is checked with the arguments of its bundle. The exit code is 1 if a
finding reaches --fail-level.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer
from coldstart.commands._completion import complete_model
from coldstart.commands._options import Common, Revision
from coldstart.commands._options import command as declare
from coldstart.commands._output import format_count

from coldstart import api
from coldstart.api import Source, ValidationReport, ValidationRequest
from coldstart.errors import CommandFailedError
from coldstart.validate import renderers
from coldstart.validate.checks import FailLevel, Level
from coldstart.validate.validation import parse_replay

RENDERERS = {"junit": renderers.render_junit, "github": renderers.render_github}


@declare(takes_vllm_args=True, formats=Literal["text", "json", "junit", "github"])
def command(
    common: Common,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL|REF...", help="Models or bundle references.", autocompletion=complete_model
        ),
    ],
    level: Annotated[
        Level,
        typer.Option("--level", help="Level of checks to run; each level includes the levels before it."),
    ] = "checksum",
    against: Annotated[
        Literal["this"] | None,
        typer.Option(
            "--against",
            help="Also check that the bundle fits this machine; the only value is `this`; default: no check.",
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
            help="Model directory; required with --level load or --level replay if the bundle was built from a directory.",
        ),
    ] = None,
    revision: Revision = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="File with one prompt per line, used only with --level replay; default: eight built-in prompts.",
        ),
    ] = None,
    concurrency: Annotated[
        str,
        typer.Option(
            "--concurrency",
            metavar="N,...",
            help="Comma-separated numbers of concurrent requests, used only with --level replay; 1 is always included.",
        ),
    ] = "1,8",
    max_tokens: Annotated[
        int,
        typer.Option(
            "--max-tokens",
            metavar="N",
            min=1,
            help="Maximum number of tokens per response; used only with --level replay.",
        ),
    ] = 64,
) -> None:
    """Check each bundle, print the findings, and fail if a finding reaches --fail-level."""
    source = Source(common.vllm_args, model, revision, common.offline, common.cache)
    replay = parse_replay(prompts, concurrency, max_tokens)
    request = ValidationRequest(words, level, source, replay, against is not None)
    with common.out.show_phase(f"validating {format_count(len(words), 'bundle')} at level {level}"):
        reports = api.validate_all(request)
    if not common.vllm_args and revision is None:
        for word, report in zip(words, reports, strict=True):
            common.print_version_note(word, report.ref)
    _show_reports(common, reports, fail_level)
    failed = [report.ref for report in reports if report.fails(fail_level)]
    if failed:
        raise CommandFailedError(
            f"{len(failed)} of {len(reports)} bundles failed validation: {', '.join(failed)}",
            hint="see the hint of each finding",
        )
    common.out.print_success(f"{len(reports)} valid", then=common.format_command("inspect", words[0]))


def _show_reports(common: Common, reports: list[ValidationReport], fail_level: FailLevel) -> None:
    form = str(common.out.format)
    out = common.out if form == "json" else replace(common.out, format="text")
    document = renderers.build_document(reports, fail_level)
    render = RENDERERS.get(form, renderers.render_text)
    out.print_result(document, lambda: render(reports, fail_level))
