"""Replay a request trace on running servers or on the simulated engine, and report the latencies.

Requests are sent at their scheduled times, even if the server is slow. Delays of the client are reported. If a live replay is
stopped by Ctrl-C or SIGTERM, or because the server exits, the report covers the requests until then. Several servers,
schedulers, hosts or fleets take turns and are compared.
"""

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from coldstart.artifacts import canonical
from coldstart.commands._completion import complete_reference
from coldstart.commands._export import Export, ExportTargets, write_report
from coldstart.commands._options import Common
from coldstart.commands._options import command as declare

from coldstart.contract import environment
from coldstart.errors import CommandFailedError, UsageError, describe_reason
from coldstart.fleet import specification
from coldstart.fleet.specification import parse_slo
from coldstart.lab import records
from coldstart.lab.live import Target, replay
from coldstart.lab.plan import TracePlan, estimate_times
from coldstart.lab.records import Replay
from coldstart.lab.traces import TraceReport, TraceRequest
from coldstart.scheduling import settings
from coldstart.scheduling.profile import IterationProfile, ProfileError
from coldstart.scheduling.settings import SchedulerSettings

EXIT_CODES = {"interrupted": 130, "terminated": 143}
LIVE, ENGINE, HOST, FLEET = "live", "simulated", "simulated host", "simulated fleet"
FLAGS = {LIVE: "--target", ENGINE: "--simulate", HOST: "--host", FLEET: "--fleet"}
KINDS = {
    LIVE: "replay on servers (--target)",
    ENGINE: "replay on the simulated engine (--simulate)",
    HOST: "replay on a simulated host (--host)",
    FLEET: "replay on a simulated fleet (--fleet)",
}
# Kinds of replay in which each of these options has an effect. All other options have an effect in every kind.
KINDS_OF_OPTION: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("model", "timeout"), (LIVE,)),
    **dict.fromkeys(("kv_blocks", *(one.option for _, one in settings.list_command_options())), (ENGINE,)),
    "profile": (ENGINE, HOST, FLEET),
}
Trace = Sequence[TraceRequest]
ReplayFunction = Callable[[TracePlan, Trace], Replay]


@declare(compares_schedulers=True, settings=TracePlan(Path()))
def command(
    common: Common,
    choices: list[SchedulerSettings],
    settings: dict[str, Any],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Trace file to replay.")],
    sweep: Annotated[
        str | None,
        typer.Option(
            "--sweep",
            metavar="RATES",
            help="Comma-separated arrival rates to replay in turn, in requests per second, such as 1,2,4. The report"
            " contains the highest rate that meets --slo.",
        ),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            metavar="URL",
            help="URL of a server that receives the requests. Repeat the option to compare several servers.",
        ),
    ] = None,
    model: Annotated[str, typer.Option("--model", help="Model name to send in every request.")] = "default",
    timeout: Annotated[
        float, typer.Option("--timeout", help="Maximum duration of a request, in seconds.")
    ] = 600.0,
    simulate: Annotated[
        bool,
        typer.Option(
            "--simulate",
            help="Replay on a simulated engine instead of on real servers; implied by --host and --fleet.",
        ),
    ] = False,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile",
            metavar="REF",
            help="Bundle or JSON file with step latencies of a model; required by --simulate.",
            autocompletion=complete_reference,
        ),
    ] = None,
    kv_blocks: Annotated[
        int | None,
        typer.Option(
            "--kv-blocks", help="Number of KV blocks of 16 tokens on the simulated GPU; default: 262144."
        ),
    ] = None,
    host: Annotated[
        list[Path] | None,
        typer.Option(
            "--host",
            metavar="FILE",
            help="TOML file of a multi-model host to simulate. Repeat the option to compare several hosts.",
        ),
    ] = None,
    fleet: Annotated[
        list[Path] | None,
        typer.Option(
            "--fleet",
            metavar="FILE",
            help="TOML file of a fleet to simulate. Repeat the option to compare several fleets.",
        ),
    ] = None,
    slo: Annotated[
        str,
        typer.Option(
            "--slo",
            help="Latency limits that a request must meet, in seconds, such as ttft=2,tpot=0.1,normalized=0.3.",
        ),
    ] = "",
    export: Export = None,
) -> None:
    """Replay the trace, write the exports and print the report."""
    exports = ExportTargets.parse(export)
    kind = HOST if host else FLEET if fleet else ENGINE if simulate else LIVE
    if host and fleet:
        raise UsageError(
            "--host and --fleet cannot be combined: each selects a different simulation",
            hint="remove one of them",
        )
    _check_target(kind, file, target, profile)
    found = parse_slo(slo, records.SLO_METRICS)
    limits: records.SloLimits = {None: {f"{name}_s": s for name, s in found.items()}} if found else {}
    try:
        plan = TracePlan(file, **settings)
        plans = [plan] if sweep is None else _plan_sweep(plan, sweep, slo, common.typed_options)
        _check_effect(kind, common.typed_options, plans[0], profile)
        for choice in choices if kind == ENGINE else ():
            choice.check_command_line()
    except ValueError as problem:
        raise UsageError(str(problem), hint="see `coldstart trace-replay --help`") from problem
    systems: dict[str, ReplayFunction]
    if kind == LIVE:
        key, uses_row_model = environment.OPENAI_API_KEY.read() or None, bool(plan.models)
        systems = _create_live_replays(target or [], model, key, uses_row_model, timeout)
    else:
        times = None if profile is None and kind == FLEET else _read_profile(profile, common)
        if kind == ENGINE:
            systems = {
                choice.policy: partial(_replay_on_engine, times, choice, kv_blocks) for choice in choices
            }
        else:
            systems = _create_simulations(kind, host or fleet or [], times)
    requested = {LIVE: target, HOST: host, FLEET: fleet, ENGINE: choices}[kind] or ()
    if len(systems) < len(requested):
        flag = "--scheduler" if kind == ENGINE else FLAGS[kind]
        raise UsageError(f"{flag} has the same value twice", hint="remove one of the two values")
    _replay(common, exports, plans, systems, kind, limits, is_sweep=sweep is not None)


def _create_live_replays(urls: Iterable[str], *options: Any) -> dict[str, ReplayFunction]:
    def send(target: Target, plan: TracePlan, trace: Trace) -> Replay:
        return replay(plan.transform(trace), target, plan.seed)

    try:
        return {url: partial(send, Target(url, *options)) for url in urls}
    except ValueError as problem:
        raise UsageError(str(problem)) from problem


def _create_simulations(
    kind: str, paths: Sequence[Path], times: IterationProfile | None
) -> dict[str, ReplayFunction]:
    """Return a replay function for each simulated host or fleet, by the path of its file."""
    from coldstart.host import configuration
    from coldstart.lab import fleet, host

    files: dict[Path, Any] = {
        path: (configuration if kind == HOST else specification).load(path) for path in paths
    }

    def simulate(path: Path, plan: TracePlan, trace: Trace) -> Replay:
        file = files[path]
        rows = plan.with_models([model.name for model in file.models], path).transform(trace)
        costs = {model.name: model.costs for model in file.models} if kind == FLEET else {}
        requests = estimate_times(rows, times, costs)
        if kind == HOST:
            return host.simulate(requests, file.models, file.settings)
        return fleet.simulate(requests, file.servers, file.models, file.settings)

    return {str(path): partial(simulate, path) for path in files}


def _replay_on_engine(
    times: IterationProfile | None,
    choice: SchedulerSettings,
    blocks: int | None,
    plan: TracePlan,
    trace: Trace,
) -> Replay:
    if not trace or times is None:
        return Replay()
    # This import loads vLLM, which takes seconds.
    from coldstart.lab import engine

    return engine.replay(plan.transform(trace), times, choice, blocks)


def _check_target(kind: str, file: Path, target: list[str] | None, profile: str | None) -> None:
    """Raise UsageError unless the options select exactly one target: running servers or a simulation."""
    if kind != LIVE and target:
        raise UsageError(f"--target and {FLAGS[kind]} cannot be combined", hint="remove one of them")
    if kind == LIVE and not target:
        name, times = shlex.quote(str(file)), shlex.quote(profile or "REF")
        simulation = f"coldstart trace-replay {name} --simulate --profile {times}"
        raise UsageError(
            "neither --target nor --simulate is set",
            hint=f"run `coldstart trace-replay {name} --target URL`, or `{simulation}` without a server",
        )


def _check_effect(kind: str, typed: frozenset[str], plan: TracePlan, profile: str | None) -> None:
    """Raise UsageError for a typed option that has no effect in this kind of replay or with the other options."""
    where = f"in a {KINDS[kind]}"
    is_random = kind == LIVE or plan.rate is not None or plan.mapping == "zipf"
    drawn = not is_random, f"{where} without random arrivals or models", "add --rate or --model-mapping zipf"
    useless = [
        (name, kind not in kinds, where, f"use it in a {', or a '.join(KINDS[other] for other in kinds)}")
        for name, kinds in KINDS_OF_OPTION.items()
    ]
    useless += [
        ("cv", plan.rate is None, "without --rate", "add --rate"),
        ("model_mapping", kind in (LIVE, ENGINE) and not plan.models, "without --models", "add --models"),
        ("model", bool(plan.models), "with --models", "omit one of them"),
        ("seed", *drawn),
        ("rounds", *drawn),
        ("max_prompt", kind == FLEET and profile is None, f"{where} without --profile", "add --profile"),
    ]
    for name, is_useless, circumstance, hint in useless:
        if name in typed and is_useless:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} has no effect {circumstance}", hint=f"omit it, or {hint}")


def _plan_sweep(plan: TracePlan, rates: str, slo: str, typed: frozenset[str]) -> list[TracePlan]:
    """Return a plan for each rate, in ascending order of the rates. Raises UsageError for an invalid rate."""
    if "rate" in typed:
        raise UsageError("--sweep and --rate cannot be combined", hint="remove one of them")
    if not slo:
        raise UsageError(
            "--sweep requires latency limits that a rate must meet", hint="add --slo ttft=2,tpot=0.1"
        )
    try:
        return [replace(plan, rate=rate) for rate in sorted({float(part) for part in rates.split(",")})]
    except ValueError as problem:
        raise UsageError(f"invalid --sweep {rates!r}: {problem}", hint="use --sweep 1,2,4") from problem


def _replay(
    common: Common,
    exports: ExportTargets,
    plans: Sequence[TracePlan],
    systems: Mapping[str, ReplayFunction],
    kind: str,
    limits: records.SloLimits,
    *,
    is_sweep: bool,
) -> None:
    """Replay the trace with each plan on each system in each round, and write one report of all runs.

    In each round, the systems are replayed one after another. Each round begins with a different system.
    """
    from coldstart.lab.report import ReplayRun, report

    rows = TraceReport()
    trace = plans[0].read(rows)
    if not rows.rows and not rows.skipped:
        raise UsageError(
            f"the trace {plans[0].path} contains no rows", hint="use a file with a row for each request"
        )
    runs: list[ReplayRun] = []
    rounds = plans[0].rounds
    compares = is_sweep or rounds > 1 or len(systems) > 1
    for plan, number, name in _take_turns(plans, [*systems]):
        where = f" on {name}" if len(systems) > 1 else ""
        where += f" at {plan.rate:g} requests/s" if is_sweep else ""
        where += f", round {number + 1}" if rounds > 1 else ""
        with common.out.show_phase(f"replay the trace{where}"):
            done = systems[name](replace(plan, seed=plan.seed + number), trace)
        runs.append(ReplayRun.from_replay(name, plan.rate if is_sweep else None, number, done, limits))
        if done.end_reason != "complete":
            break
    write_report(common.out, exports, report(kind, runs, asdict(rows), is_comparison=compares))
    for row in rows.bad_rows[:5]:
        common.out.warn(f"line {row.line} skipped: {row.reason}")
    if rows.skipped > 5:
        common.out.warn(f"{rows.skipped} rows skipped in total")
    _report_outcome(runs, rows.trace_format, kind, common)


def _take_turns(plans: Sequence[TracePlan], names: list[str]) -> Iterator[tuple[TracePlan, int, str]]:
    for plan in plans:
        for number in range(plan.rounds):
            first = number % len(names)
            yield from ((plan, number, name) for name in names[first:] + names[:first])


def _read_profile(source: str | None, common: Common) -> IterationProfile:
    if source is None:
        hint = "specify a bundle or a JSON file: --profile REF"
        raise UsageError(
            "--simulate requires --profile, which contains the step latencies of a model", hint=hint
        )
    try:
        if Path(source).is_file():
            return IterationProfile.parse(canonical.read_json(Path(source)))
        return IterationProfile.parse(common.store().find_by_reference(source).read_json("iterations"))
    except (ProfileError, ValueError) as problem:
        hint = "specify a bundle or a JSON file with step latencies: --profile REF"
        raise UsageError(f"cannot use --profile {source}: {describe_reason(problem)}", hint=hint) from problem


def _report_outcome(runs: Sequence[Any], trace_format: str, kind: str, common: Common) -> None:
    """Print the causes of failed requests; raise an error if a replay was interrupted or had no successful request."""
    ended, requests = runs[-1].document["ended"], sum(run.document["requests"] for run in runs)
    causes = Counter[str]()
    for run in runs:
        causes.update({cause["error"]: cause["requests"] for cause in run.document["causes"]})
    for error, count in causes.items():
        common.out.warn(f"{count} of {requests} requests failed: {error}")
    if ended in EXIT_CODES:
        common.out.warn(f"{ended}: the result covers the requests until then")
        raise SystemExit(EXIT_CODES[ended])
    if ended == "target dead":
        raise CommandFailedError(
            f"the target {runs[-1].name} does not respond ({next(iter(causes), None)})",
            hint="run `coldstart serve MODEL` to start a server",
        )
    if not requests:
        raise CommandFailedError(
            "no request was replayed: the trace has no usable row",
            hint="specify the columns of the trace with --columns",
        )
    for run in runs:
        if run.document["failed"] == (count := run.document["requests"]):
            hint = "check --target and --model, or --models" if kind == LIVE else "check the file"
            raise CommandFailedError(f"every request to {run.name} failed ({count} in total)", hint=hint)
    common.out.print_success(f"Replayed {requests} requests, read as {trace_format}")
