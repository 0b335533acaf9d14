"""Plan and simulate a fleet of servers from its file. Nothing is started: there is no live fleet yet."""

from pathlib import Path
from typing import Annotated

import typer
from coldstart.commands._options import Common, group
from coldstart.commands._options import command as declare

app = group(__doc__)
_FILE = typer.Argument(metavar="FILE", help="The fleet's TOML file: servers and models.")


@app.command(help="Show where each model would start on the empty fleet, and what was weighed.")
@declare()
def plan(
    common: Common,
    file: Annotated[Path, _FILE],
    model: Annotated[
        list[str] | None, typer.Option("--model", metavar="NAME", help="Only this model; repeatable.")
    ] = None,
    required: Annotated[
        int, typer.Option("--required", min=1, metavar="N", help="Workers that the load asks for.")
    ] = 1,
) -> None:
    """Predict, and show."""
    from coldstart.fleet import configuration
    from coldstart.fleet import plan as plans

    found = plans.planned(configuration.load(file), tuple(model or ()), required)
    common.out.result({"kind": "predicted", "models": found}, lambda: plans.text(found))


@app.command(help="Simulate made-up requests on the fleet; trace-replay --fleet takes real ones.")
@declare()
def simulate(
    common: Common,
    file: Annotated[Path, _FILE],
    rate: Annotated[float, typer.Option("--rate", help="Requests per second.")] = 1.0,
    cv: Annotated[float, typer.Option("--cv", help="CV of the gaps; 1 is Poisson.")] = 1.0,
    duration: Annotated[float, typer.Option("--duration", help="Seconds of arrivals.")] = 3600.0,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Output tokens of each.")] = 128,
    seed: Annotated[int, typer.Option("--seed", help="Seed of arrivals and models.")] = 0,
) -> None:
    """Simulate, and show."""
    from coldstart.fleet import configuration, replay

    known = configuration.load(file)
    with common.out.phase("simulate the fleet"):
        found = replay.run(known, replay.generated(known, rate, cv, duration, tokens, seed))
    common.out.result(found, lambda: replay.text(found))
