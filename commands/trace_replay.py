"""Replay a request trace on running servers or on the simulated engine, and report the latencies.

Requests are sent on time, even if the server is slow; delays of the client are reported. After Ctrl-C or the end of the
target, the report covers what was measured.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from coldstart.artifacts import canonical
from coldstart.commands import _replay_options
from coldstart.commands._completion import complete_reference
from coldstart.commands._export import Exports, give
from coldstart.commands._options import Baseline, Common, Gaps, Seed
from coldstart.commands._options import command as declare

from coldstart.bench.report.report import Report
from coldstart.contract import environment
from coldstart.errors import CommandFailedError, UsageError, describe
from coldstart.lab.live import ReplaySettings, Target, replay
from coldstart.lab.plan import TracePlan, time_requests
from coldstart.lab.records import (
    COLUMNS,
    MARKS,
    SWEEP_COLUMNS,
    Limits,
    Replay,
    compare,
    format_rates,
    format_sweep,
    format_text,
    list_metrics,
    list_records,
    tabulate,
)
from coldstart.lab.records import report as report_replay
from coldstart.lab.records import sweep as sweep_rates
from coldstart.lab.traces import TraceReport, TraceRequest
from coldstart.scheduling import IterationProfile, ProfileError, SchedulerSettings

INTERRUPTED = 130


def _flag(*names: str, help: str, metavar: str | None = None, **more: Any) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, **more)


@declare(chooses_scheduler=True, exports=True)
def command(
    common: Common,
    choice: SchedulerSettings,
    exports: Exports,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Trace file to replay.")],
    trace_format: Annotated[
        str,
        _flag(
            "--trace-format",
            help="Format: mooncake, azure-llm, azure-functions, burstgpt, sharegpt, alpaca or csv.",
        ),
    ] = "mooncake",
    columns: Annotated[
        str | None, _flag("--columns", help="Columns of a csv trace: time=C,prompt=C,output=C and others.")
    ] = None,
    on_bad_row: Annotated[
        str, _flag("--on-bad-row", help="Action on an invalid row: skip or refuse.")
    ] = "skip",
    speedup: Annotated[float, _flag("--speedup", help="Factor by which arrivals are accelerated.")] = 1.0,
    duration: Annotated[
        float | None, _flag("--duration", help="Number of seconds to replay; default: all.")
    ] = None,
    limit: Annotated[int | None, _flag("--limit", help="Number of requests to replay; default: all.")] = None,
    rate: Annotated[
        float | None,
        _flag("--rate", help="Arrivals per second with gamma-distributed gaps; default: as in the trace."),
    ] = None,
    sweep: Annotated[
        str | None,
        _flag(
            "--sweep",
            metavar="RATES",
            help="Arrival rates to replay one after the other, such as 1,2,4; reports the highest that meets --slo.",
        ),
    ] = None,
    cv: Gaps = 1.0,
    seed: Seed = 0,
    max_prompt: Annotated[
        int | None, _flag("--max-prompt", help="Maximum number of prompt tokens; default: no limit.")
    ] = None,
    max_output: Annotated[
        int | None, _flag("--max-output", help="Maximum number of output tokens; default: no limit.")
    ] = None,
    models: Annotated[
        str | None, _flag("--models", help="Models to which rows are assigned, separated by commas.")
    ] = None,
    mapping: Annotated[
        str,
        typer.Option(
            "--model-mapping",
            help="Assignment of rows to models: round-robin, zipf or column.",
        ),
    ] = "round-robin",
    target: Annotated[
        list[str] | None,
        _flag("--target", metavar="URL", help="URL of a server to send the requests to; repeatable."),
    ] = None,
    model: Annotated[str, _flag("--model", help="Model name in the requests.")] = "default",
    balance: Annotated[
        str,
        _flag(
            "--balance", help="Assignment of requests to servers: round-robin, least-outstanding or random."
        ),
    ] = "round-robin",
    vocabulary: Annotated[int, _flag("--vocabulary", min=11, help="Upper limit of prompt token ids.")] = 1000,
    timeout: Annotated[float, _flag("--timeout", help="Maximum duration of a request in seconds.")] = 600.0,
    simulate: Annotated[
        bool,
        _flag(
            "--simulate",
            help="Replay on the simulated engine instead of servers; --host and --fleet imply it.",
        ),
    ] = False,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            metavar="REF",
            help="Bundle or JSON file with step latencies; required by --simulate.",
            autocompletion=complete_reference,
        ),
    ] = None,
    kv_blocks: Annotated[
        int | None,
        _flag(
            "--kv-blocks", help="Number of simulated KV blocks of 16 tokens on the device; default: 262144."
        ),
    ] = None,
    host: Annotated[
        Path | None, _flag("--host", metavar="FILE", help="TOML file of a host of many models to simulate.")
    ] = None,
    fleet: Annotated[
        Path | None, _flag("--fleet", metavar="FILE", help="TOML file of a fleet of servers to simulate.")
    ] = None,
    slo: Annotated[
        str, _flag("--slo", help="Limits in seconds, such as ttft=2,tpot=0.1,normalized=0.3.")
    ] = "",
    baseline: Baseline = None,
) -> None:
    """Replay the trace, write the reports and print the result."""
    simulate = simulate or host is not None or fleet is not None
    _replay_options.check_target(
        file, simulate=simulate, target=bool(target), host=host, fleet=fleet, profile=profile
    )
    _replay_options.check_effect(
        common.typed,
        simulate=simulate,
        host=host,
        fleet=fleet,
        profile=profile,
        rate=rate,
        trace_format=trace_format,
        models=models,
        target=target,
    )
    _replay_options.check_positive(
        speedup=speedup,
        duration=duration,
        limit=limit,
        rate=rate,
        max_prompt=max_prompt,
        max_output=max_output,
    )
    if on_bad_row not in ("skip", "refuse"):
        raise UsageError(f"unknown --on-bad-row {on_bad_row!r}", hint="write --on-bad-row skip, or refuse")
    limits: Limits = {None: found} if (found := _replay_options.parse_slo(slo)) else {}
    before = _replay_options.read_baseline(baseline)
    plan = TracePlan(
        file,
        trace_format,
        columns,
        strict=on_bad_row == "refuse",
        speedup=speedup,
        duration_s=duration,
        limit=limit,
        rate=rate,
        cv=cv,
        seed=seed,
        models=_replay_options.parse_models(models),
        mapping=mapping,
        max_prompt=max_prompt,
        max_output=max_output,
    )
    rates = _replay_options.parse_sweep(sweep, slo, common.typed)
    report = TraceReport()
    kind = f"simulated {'host' if host else 'fleet' if fleet else ''}".strip() if simulate else "live"

    def serve(plan: TracePlan, report: TraceReport) -> Replay:
        if host is not None:
            return _on_host(plan, host, _profile(profile, common), report)
        if fleet is not None:
            return _on_fleet(plan, fleet, None if profile is None else _profile(profile, common), report)
        if simulate:
            _check_scheduler(choice)
            times = _profile(profile, common)
            return _on_engine(_read(plan, report), times, choice, kv_blocks)
        client = ReplaySettings(seed, vocabulary, timeout, balance)
        return _send(_read(plan, report), target or [], model, client, by_row=bool(plan.models))

    if rates:
        _sweep(common, exports, plan, rates, kind, limits, serve)
        return
    with common.out.phase("replay the trace"):
        done = serve(plan, report)
    frame = tabulate(done.records)
    document = report_replay(kind, done, frame, limits)
    document["rows"] = asdict(report)
    ratios = None if before is None else compare(document, before)
    if ratios is not None:
        document["against_baseline"] = ratios
    _show(common, exports, document, ratios, frame)
    _warn(common, report)
    _end(done, document, common)


def _sweep(
    common: Common,
    exports: Exports,
    plan: TracePlan,
    rates: tuple[float, ...],
    kind: str,
    limits: Limits,
    serve: Callable[[TracePlan, TraceReport], Replay],
) -> None:
    """Replay the trace at each rate, and print a table with the highest rate that meets the SLO."""
    found: dict[float, dict[str, Any]] = {}
    for rate in rates:
        report = TraceReport()
        with common.out.phase(f"replay the trace at {rate:g} requests/s"):
            done = serve(replace(plan, rate=rate), report)
        document = report_replay(kind, done, tabulate(done.records), limits)
        found[rate] = document
        if done.ended != "complete":
            break
    _warn(common, report)
    document = {"schema_version": 1, **sweep_rates(kind, found)}
    shown = json.dumps(document) if common.out.format == "json" else format_sweep(document)
    result = Report(f"trace-replay, {kind}", document, SWEEP_COLUMNS, lambda: document["sweep"])
    give(replace(common.out, format="text"), exports, result, shown)
    _end(done, found[rate], common)


def _read(plan: TracePlan, report: TraceReport) -> list[TraceRequest]:
    """Return the requests. Raises UsageError for a trace without any row."""
    rows = plan.rows(report)
    if not report.rows and not report.skipped:
        raise UsageError(
            f"the trace {plan.path} contains no rows", hint="use a file with a row for each request"
        )
    return rows


def _send(
    rows: list[TraceRequest], urls: list[str], model: str, settings: ReplaySettings, *, by_row: bool
) -> Replay:
    key = environment.OPENAI_API_KEY.read() or None
    try:
        return replay(rows, [Target(url, model, key, by_row=by_row) for url in urls], settings)
    except ValueError as problem:
        raise UsageError(str(problem)) from problem


def _on_engine(
    rows: list[TraceRequest], profile: IterationProfile, choice: SchedulerSettings, kv_blocks: int | None
) -> Replay:
    if not rows:
        return Replay()
    # This import loads vLLM, which takes seconds.
    from coldstart.lab import engine

    return engine.replay(rows, profile, choice, kv_blocks)


def _on_host(plan: TracePlan, path: Path, profile: IterationProfile, report: TraceReport) -> Replay:
    from coldstart.host.configuration import load
    from coldstart.lab.host import simulate

    file = load(path)
    rows = _read(plan.over([model.name for model in file.models], path), report)
    return simulate(time_requests(rows, profile, {}), file.models, file.settings)


def _on_fleet(plan: TracePlan, path: Path, profile: IterationProfile | None, report: TraceReport) -> Replay:
    from coldstart.fleet.specification import load
    from coldstart.lab.fleet import simulate

    file = load(path)
    costs = {model.name: model.costs for model in file.models}
    rows = _read(plan.over([*costs], path), report)
    return simulate(time_requests(rows, profile, costs), file.servers, file.models, file.settings)


def _check_scheduler(choice: SchedulerSettings) -> None:
    try:
        choice.check_command_line()
    except ValueError as problem:
        raise UsageError(str(problem), hint="coldstart trace-replay --help") from problem


def _profile(given: str | None, common: Common) -> IterationProfile:
    if given is None:
        hint = "specify a bundle or a JSON file: --profile REF"
        raise UsageError("--simulate needs the iteration times of a model and machine", hint=hint)
    try:
        if Path(given).is_file():
            return IterationProfile.parse(canonical.read(Path(given)))
        return IterationProfile.parse(common.store().get(given).json("iterations"))
    except (ProfileError, ValueError) as problem:
        hint = "specify a bundle, or a JSON file with iteration times: --profile REF"
        raise UsageError(f"--profile {given}: {describe(problem)}", hint=hint) from problem


def _show(
    common: Common,
    exports: Exports,
    document: dict[str, Any],
    ratios: dict[str, float] | None,
    frame: Any,
) -> None:
    def parts() -> Iterable[str]:
        from coldstart.lab.page import render_parts

        return render_parts(document, frame)

    title = f"trace-replay, {document['kind']}"
    document = {"schema_version": 1, **document}
    # One line of JSON, so that the last line of a log is the whole result.
    shown = json.dumps(document) if common.out.format == "json" else format_text(document, ratios)
    report = Report(
        title,
        document,
        COLUMNS,
        partial(list_records, frame),
        lambda: [(("seconds", *MARKS), list_metrics(document))],
        format_rates(document),
        parts,
    )
    give(replace(common.out, format="text"), exports, report, shown)


def _warn(common: Common, report: TraceReport) -> None:
    for row in report.bad_rows[:5]:
        common.out.warn(f"line {row.line} skipped: {row.reason}")
    if report.skipped > 5:
        common.out.warn(f"{report.skipped} rows skipped in total")


def _end(done: Replay, document: dict[str, Any], common: Common) -> None:
    requests = len(done.records)
    for cause in document["causes"]:
        common.out.warn(f"{cause['requests']} of {requests} requests failed: {cause['error']}")
    if done.ended == "interrupted":
        common.out.warn("interrupted: the result covers what was measured until then")
        raise SystemExit(INTERRUPTED)
    if done.ended == "target dead":
        raise CommandFailedError(
            f"the target does not respond ({done.error})", hint="start a server: coldstart serve MODEL"
        )
    if not requests:
        raise CommandFailedError(
            "no request was replayed: the trace has no usable row",
            hint="choose another --trace-format or --columns",
        )
    if document["failed"] == requests:
        hint = "check --target and --model, or --models" if document["kind"] == "live" else "check the file"
        raise CommandFailedError(f"none of the {requests} requests succeeded", hint=hint)
    common.out.success(f"Replayed {requests} requests")
