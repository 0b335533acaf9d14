"""Serve models on many servers: plan, or run on Ray."""

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


register(app)
