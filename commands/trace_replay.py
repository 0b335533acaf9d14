"""Replay a request trace on running servers or on the simulated engine, and report the latencies.

Requests are sent on time, even if the server is slow; delays of the client are reported. On servers, the report covers what
was measured until Ctrl-C or the end of the target.
"""

import shlex
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from coldstart.artifacts import canonical
from coldstart.commands._completion import complete_reference
from coldstart.commands._export import Exports, give_measurement
from coldstart.commands._options import Common
from coldstart.commands._options import command as declare

from coldstart.bench.report.report import Report
from coldstart.contract import environment
from coldstart.errors import CommandFailedError, UsageError, describe
from coldstart.lab import records
from coldstart.lab.live import ReplaySettings, Target, replay
from coldstart.lab.plan import TracePlan, time_requests
from coldstart.lab.records import Limits, Replay
from coldstart.lab.traces import TraceReport, TraceRequest
from coldstart.scheduling import IterationProfile, ProfileError, SchedulerSettings, settings

INTERRUPTED = 130
LIVE, ENGINE, HOST, FLEET = "live", "simulated", "simulated host", "simulated fleet"
KINDS = {
    LIVE: "replay on servers (--target)",
    ENGINE: "replay on the simulated engine (--simulate)",
    HOST: "replay on a simulated host (--host)",
    FLEET: "replay on a simulated fleet (--fleet)",
}
# Options, by parameter, that have an effect only in some kinds of replay; the others have one in each.
EFFECTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("model", "vocabulary", "timeout"), (LIVE,)),
    **dict.fromkeys(("kv_blocks", *(one.option for _, one in settings.options())), (ENGINE,)),
    "profile": (ENGINE, HOST, FLEET),
}
Serve = Callable[[TracePlan, TraceReport], Replay]


@declare(chooses_scheduler=True, exports=True, sets=TracePlan(Path()))
def command(
    common: Common,
    choice: SchedulerSettings,
    exports: Exports,
    settings: dict[str, Any],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Trace file to replay.")],
    sweep: Annotated[
        str | None,
        typer.Option(
            "--sweep",
            metavar="RATES",
            help="Arrival rates to replay one after the other, such as 1,2,4; reports the highest that meets --slo.",
        ),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            metavar="URL",
            help="URL of a server to send the requests to; several take turns. Repeatable.",
        ),
    ] = None,
    model: Annotated[str, typer.Option("--model", help="Model name in the requests.")] = "default",
    vocabulary: Annotated[
        int, typer.Option("--vocabulary", min=11, help="Upper limit of prompt token ids.")
    ] = 1000,
    timeout: Annotated[
        float, typer.Option("--timeout", help="Maximum duration of a request in seconds.")
    ] = 600.0,
    simulate: Annotated[
        bool,
        typer.Option(
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
        typer.Option(
            "--kv-blocks", help="Number of simulated KV blocks of 16 tokens on the device; default: 262144."
        ),
    ] = None,
    host: Annotated[
        Path | None,
        typer.Option("--host", metavar="FILE", help="TOML file of a host of many models to simulate."),
    ] = None,
    fleet: Annotated[
        Path | None,
        typer.Option("--fleet", metavar="FILE", help="TOML file of a fleet of servers to simulate."),
    ] = None,
    slo: Annotated[
        str, typer.Option("--slo", help="Limits in seconds, such as ttft=2,tpot=0.1,normalized=0.3.")
    ] = "",
) -> None:
    """Replay the trace, write the reports and print the result."""
    kind = HOST if host else FLEET if fleet else ENGINE if simulate else LIVE
    if host and fleet:
        raise UsageError(
            "--host and --fleet exclude each other: each chooses its own simulation", hint="give one of them"
        )
    _check_target(kind, file, target, profile)
    try:
        plan = TracePlan(file, **settings)
        _check_effect(kind, common.typed, plan, profile)
        if kind == ENGINE:
            choice.check_command_line()
    except ValueError as problem:
        raise UsageError(str(problem), hint="coldstart trace-replay --help") from problem
    plans = [plan] if sweep is None else _plan_sweep(plan, sweep, slo, common.typed)
    limits: Limits = {None: found} if (found := records.parse_slo(slo)) else {}

    def serve(plan: TracePlan, report: TraceReport) -> Replay:
        times = None if profile is None and kind == FLEET else _profile(profile, common)
        if host is not None:
            return _on_host(plan, host, times, report)
        if fleet is not None:
            return _on_fleet(plan, fleet, times, report)
        return _on_engine(_read(plan, report), times, choice, kv_blocks)

    def send(plan: TracePlan, report: TraceReport) -> Replay:
        rows, key = _read(plan, report), environment.OPENAI_API_KEY.read() or None
        try:
            targets = [Target(url, model, key, by_row=bool(plan.models)) for url in target or []]
            return replay(rows, targets, ReplaySettings(plan.seed, vocabulary, timeout))
        except ValueError as problem:
            raise UsageError(str(problem)) from problem

    _replay(common, exports, plans, kind, limits, send if kind == LIVE else serve, is_sweep=sweep is not None)


def _check_target(kind: str, file: Path, target: list[str] | None, profile: str | None) -> None:
    """Raise UsageError unless the options select one target: servers, or one of the three simulations."""
    if kind != LIVE and target:
        flag = {ENGINE: "--simulate", HOST: "--host", FLEET: "--fleet"}[kind]
        raise UsageError(f"--target and {flag} exclude each other", hint="remove one of them")
    if kind == LIVE and not target:
        name, times = shlex.quote(str(file)), shlex.quote(profile or "REF")
        simulation = f"coldstart trace-replay {name} --simulate --profile {times}"
        raise UsageError(
            "choose one of --target and --simulate",
            hint=f"coldstart trace-replay {name} --target URL; without a server: {simulation}",
        )


def _check_effect(kind: str, typed: frozenset[str], plan: TracePlan, profile: str | None) -> None:
    """Raise UsageError for a typed option without effect in this kind of replay, or without another option."""
    for name in sorted(typed & EFFECTS.keys()):
        if kind not in EFFECTS[name]:
            others = ", or a ".join(KINDS[other] for other in EFFECTS[name])
            raise UsageError(
                f"--{name.replace('_', '-')} has no effect in a {KINDS[kind]}",
                hint=f"omit it; it applies to a {others}",
            )
    without = {
        "cv": (plan.rate is None and "sweep" not in typed, "without --rate", "add --rate"),
        "columns": (
            plan.trace_format in ("mooncake", "azure-functions", "sharegpt", "alpaca"),
            f"with --trace-format {plan.trace_format}",
            "add --trace-format csv",
        ),
        "model_mapping": (kind in (LIVE, ENGINE) and not plan.models, "without --models", "add --models"),
        "model": (bool(plan.models), "with --models", "omit one of them"),
        "max_prompt": (
            kind == FLEET and profile is None,
            f"in a {KINDS[FLEET]} without --profile",
            "add --profile",
        ),
    }
    for name, (useless, circumstance, hint) in without.items():
        if name in typed and useless:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} has no effect {circumstance}", hint=f"omit it, or {hint}")


def _plan_sweep(plan: TracePlan, rates: str, slo: str, typed: frozenset[str]) -> list[TracePlan]:
    """Return the plan with each rate in ascending order. Raises UsageError."""
    if "rate" in typed:
        raise UsageError("--sweep and --rate exclude each other", hint="remove one of them")
    if not slo:
        raise UsageError("--sweep needs the limits that a rate must meet", hint="add --slo ttft=2,tpot=0.1")
    try:
        return [replace(plan, rate=rate) for rate in sorted({float(part) for part in rates.split(",")})]
    except ValueError as problem:
        raise UsageError(f"--sweep {rates!r}: {problem}", hint="write --sweep 1,2,4") from problem


def _replay(
    common: Common,
    exports: Exports,
    plans: list[TracePlan],
    kind: str,
    limits: Limits,
    serve: Serve,
    *,
    is_sweep: bool,
) -> None:
    """Replay each plan; print the result, or of a sweep a table with the highest rate that meets the SLO."""
    found: dict[float, dict[str, Any]] = {}
    for plan in plans:
        report = TraceReport()
        where = f" at {plan.rate:g} requests/s" if is_sweep else ""
        with common.out.phase(f"replay the trace{where}"):
            done = serve(plan, report)
        frame = records.tabulate(done.records)
        document = records.report(kind, done, frame, limits) | {"rows": asdict(report)}
        found[plan.rate or 0.0] = document
        if done.ended != "complete":
            break
    title = f"trace-replay, {kind}"
    if is_sweep:
        swept = {"schema_version": 1, **records.sweep(kind, found)}
        notes = [records.describe_sweep(swept)]
        shown = Report(title, swept, records.SWEEP_COLUMNS, lambda: swept["sweep"], notes=notes)
    else:
        shown = Report(
            title,
            {"schema_version": 1, **document},
            records.COLUMNS,
            partial(records.list_records, frame),
            partial(records.list_tables, document),
            records.list_rates(document),
            partial(_plots, document, frame),
        )
    give_measurement(common.out, exports, shown)
    for row in report.bad_rows[:5]:
        common.out.warn(f"line {row.line} skipped: {row.reason}")
    if report.skipped > 5:
        common.out.warn(f"{report.skipped} rows skipped in total")
    _end(done, document, common)


def _plots(document: dict[str, Any], frame: Any) -> Any:
    from coldstart.lab.page import plot

    return plot(document, frame)


def _read(plan: TracePlan, report: TraceReport) -> list[TraceRequest]:
    """Return the requests. Raises UsageError for a trace without any row."""
    rows = plan.rows(report)
    if not report.rows and not report.skipped:
        raise UsageError(
            f"the trace {plan.path} contains no rows", hint="use a file with a row for each request"
        )
    return rows


def _on_engine(
    rows: list[TraceRequest], profile: IterationProfile | None, choice: SchedulerSettings, blocks: int | None
) -> Replay:
    if not rows or profile is None:
        return Replay()
    # This import loads vLLM, which takes seconds.
    from coldstart.lab import engine

    return engine.replay(rows, profile, choice, blocks)


def _on_host(plan: TracePlan, path: Path, profile: IterationProfile | None, report: TraceReport) -> Replay:
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
