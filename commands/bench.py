"""Measure cold starts from launch to first token: plain vLLM against each start mode.

Every round runs each mode once. Exit code 1 if tokens differ, a fast path was not used, a server died, or --baseline
shows a regression. The files of --export are written after each run. Arguments after -- go to vLLM in all modes.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from coldstart.commands._export import Exports, give_measurement
from coldstart.commands._options import READY_TIMEOUT, Common, Model, Revision
from coldstart.commands._options import command as declare

from coldstart.bench import run_order
from coldstart.bench.benchmark import BenchRequest, run
from coldstart.bench.report import starts
from coldstart.errors import CommandFailedError


@declare(takes_vllm_args=True, exports=True)
def command(
    common: Common,
    exports: Exports,
    model: Model,
    runs: Annotated[
        int, typer.Option("--runs", min=1, help="Number of measured runs per mode, after the warm-up.")
    ] = 5,
    warmup: Annotated[
        int, typer.Option("--warmup", min=0, help="Number of warm-up runs per mode, which are not counted.")
    ] = 1,
    modes: Annotated[
        str | None,
        typer.Option(
            "--modes",
            metavar="M,...",
            help=f"Modes to measure, of {', '.join(run_order.MODES)}; default: all.",
        ),
    ] = None,
    steady: Annotated[
        bool,
        typer.Option("--steady/--no-steady", help="Also measure latency and throughput after the start."),
    ] = True,
    ready_timeout: Annotated[float, READY_TIMEOUT] = 900,
    baseline: Annotated[
        Path | None,
        typer.Option("--baseline", metavar="FILE", help="JSON result of an earlier run to compare with."),
    ] = None,
    max_regress: Annotated[
        float,
        typer.Option("--max-regress", metavar="PCT", help="Permitted slowdown over --baseline, in percent."),
    ] = 10.0,
    revision: Revision = None,
) -> None:
    """Measure, write the reports and the result, and fail if a check fails."""
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
    with common.out.phase("measure cold starts") as step:
        request = replace(request, command_line=_command_line(request))
        document = run(request, step, lambda document: exports.keep(starts.report(document)))
    files = give_measurement(common.out, exports, starts.report(document))
    if document["failures"]:
        raise CommandFailedError("; ".join(document["failures"]), hint="coldstart doctor")
    where = ", ".join(files) or None
    then = "coldstart bench MODEL --export json=baseline.json" if not files else None
    common.out.success(f"Measured {document['model']}", where=where, then=then)


def _command_line(request: BenchRequest) -> list[str]:
    line = ["coldstart", "bench", request.model, "--runs", str(request.runs), "--warmup", str(request.warmup)]
    line += ["--modes", ",".join(request.modes)] if request.modes else []
    line += [] if request.steady else ["--no-steady"]
    return [*line, "--", *request.vllm_args] if request.vllm_args else line
