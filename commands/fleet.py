"""Serve models on many servers: plan, simulate, or run on Ray."""

from pathlib import Path
from typing import Annotated

import typer
from coldstart.commands._fleet_live import register
from coldstart.commands._options import Common, group
from coldstart.commands._options import command as declare

app = group(__doc__)
_FILE = typer.Argument(metavar="FILE", help="TOML file of the fleet: servers and models.")


@app.command(help="Show where each model would start. Assumes an empty fleet, and lists the alternatives.")
@declare()
def plan(
    common: Common,
    file: Annotated[Path, _FILE],
    model: Annotated[
        list[str] | None, typer.Option("--model", metavar="NAME", help="Plan only this model; repeatable.")
    ] = None,
    required: Annotated[
        int, typer.Option("--required", min=1, metavar="N", help="Number of workers to place.")
    ] = 1,
) -> None:
    """Print the predicted placements."""
    from coldstart.fleet import plan as plans
    from coldstart.fleet import specification

    found = plans.planned(specification.load(file), tuple(model or ()), required)
    common.out.result({"kind": "predicted", "models": found}, lambda: plans.text(found))


@app.command(help="Simulate generated requests on the fleet. To read a trace, use trace-replay --fleet.")
@declare()
def simulate(
    common: Common,
    file: Annotated[Path, _FILE],
    rate: Annotated[float, typer.Option("--rate", help="Number of requests per second.")] = 1.0,
    cv: Annotated[
        float,
        typer.Option("--cv", help="Coefficient of variation of the gaps between arrivals; 1 is Poisson."),
    ] = 1.0,
    duration: Annotated[
        float, typer.Option("--duration", help="How long requests keep arriving, in seconds.")
    ] = 3600.0,
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, help="Number of output tokens per request.")
    ] = 128,
    seed: Annotated[int, typer.Option("--seed", help="Random seed of arrivals and models.")] = 0,
) -> None:
    """Print the result of the simulation."""
    from coldstart.commands._export import format_report

    from coldstart.fleet import specification
    from coldstart.lab import plan, records
    from coldstart.lab.fleet import simulate

    known = specification.load(file)
    costs = {model.name: model.costs for model in known.models}
    with common.out.phase("simulate the fleet"):
        rows = plan.generate([*costs], rate, cv, duration, tokens, seed)
        done = simulate(plan.time_requests(rows, None, costs), known.servers, known.models, known.settings)
        found = records.report("simulated fleet", done, records.tabulate(done.records), {})
    common.out.result(found, lambda: format_report(records.list_tables(found), records.list_rates(found)))


register(app)
