"""Measure cold starts from launch to first token: plain vLLM against each start mode.

Modes: vllm-cold, vllm-warm, fresh, template-runtime, template-engine, snapshot; every round runs each once.
Exit 1 when tokens differ, a fast path was not taken, a server died, or --baseline shows a regression.
What follows -- goes to vLLM in all modes.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from coldstart.commands._options import Common
from coldstart.commands._options import command as declare
from coldstart.commands._output import table

from coldstart.errors import CommandFailed, Usage
from coldstart.measure.bench.benchmark import BenchRequest, run
from coldstart.measure.report import html, markdown, rows

EXPORTS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "markdown": markdown.render,
    "html": html.render,
    "json": lambda document: json.dumps(document, indent=2),
}
EXPORT_HELP = "Give the result as markdown, html or json; FORM=FILE writes one more report. Repeatable."


@declare(takes_vllm_args=True)
def command(
    common: Common,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Alias, repository or directory.")],
    runs: Annotated[int, typer.Option("--runs", min=1, help="Counted rounds.")] = 5,
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Uncounted runs per mode.")] = 1,
    modes: Annotated[str | None, typer.Option("--modes", metavar="M,...", help="Only these modes.")] = None,
    steady: Annotated[bool, typer.Option("--steady/--no-steady", help="Also measure past the start.")] = True,
    ready_timeout: Annotated[float, typer.Option("--ready-timeout", help="Seconds a start may take.")] = 900,
    baseline: Annotated[
        Path | None, typer.Option("--baseline", metavar="FILE", help="A saved JSON result.")
    ] = None,
    max_regress: Annotated[
        float, typer.Option("--max-regress", metavar="PCT", help="Slowdown that is allowed.")
    ] = 10.0,
    export: Annotated[
        list[str] | None, typer.Option("--export", metavar="FORM[=FILE]", help=EXPORT_HELP)
    ] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Revision of a hub model.")] = None,
) -> None:
    """Measure, write the reports, show the result, fail where the answer is no."""
    form, files = _exports(export or [])
    request = BenchRequest(
        model=model,
        vllm_args=common.vllm_args,
        modes=modes.split(",") if modes else None,
        runs=runs,
        warmup=warmup,
        steady=steady,
        ready_timeout_s=ready_timeout,
        baseline=baseline,
        max_regress_pct=max_regress,
        revision=revision,
        offline=common.offline,
        cache=common.cache,
    )
    document = run(replace(request, command_line=_command_line(request)), common.out.note)
    for path, wanted in files.items():
        path.write_text(EXPORTS[wanted](document), encoding="utf-8")
    _show(common, document, form)
    _judge(document, common, list(files))


def _show(common: Common, document: Mapping[str, Any], form: str | None) -> None:
    if form:
        text = EXPORTS[form](document)
    else:
        # One line, so that the last line of a log is the whole result.
        text = json.dumps(document) if common.out.format == "json" else _text(document)
    replace(common.out, format="text").result(document, text)


def _text(document: Mapping[str, Any]) -> str:
    notes = [*rows.verdict(document), *rows.unavailable(document)]
    return "\n".join([table(rows.HEADERS, rows.rows(document)), "", *notes])


def _judge(document: Mapping[str, Any], common: Common, files: list[Path]) -> None:
    if document["failures"]:
        raise CommandFailed("; ".join(document["failures"]), mend="coldstart doctor")
    where = ", ".join(path.name for path in files) or None
    then = "coldstart bench MODEL --export json=baseline.json" if not files else None
    common.out.success(f"Measured {document['model']}", where=where, then=then)


def _exports(wanted: list[str]) -> tuple[str | None, dict[Path, str]]:
    pairs = [item.partition("=")[::2] for item in wanted]
    for form, _ in pairs:
        if form not in EXPORTS:
            raise Usage(f"--export {form} is none of {', '.join(EXPORTS)}.", mend="coldstart bench --help")
    results = [form for form, file in pairs if not file]
    if len(results) > 1:
        raise Usage("only one --export can be the result.", mend="name files: --export html=FILE")
    files = {Path(file): form for form, file in pairs if file}
    for path in files:
        if not path.parent.is_dir():
            raise Usage(f"{path.parent} is no directory.", mend="name a file in one that exists")
    return (results[0] if results else None), files


def _command_line(request: BenchRequest) -> list[str]:
    line = ["coldstart", "bench", request.model, "--runs", str(request.runs), "--warmup", str(request.warmup)]
    line += ["--modes", ",".join(request.modes)] if request.modes else []
    line += [] if request.steady else ["--no-steady"]
    return [*line, "--", *request.vllm_args] if request.vllm_args else line
