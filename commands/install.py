"""Install an extra of coldstart, such as vLLM for this machine's CPU (`cpu`) or GPU (`gpu`)."""

from pathlib import Path
from typing import Annotated

import typer
from coldstart.commands._options import Common
from coldstart.commands._options import command as declare

from coldstart.errors import UsageError
from coldstart.system import installation


@declare()
def command(
    common: Common,
    extra: Annotated[str, typer.Argument(metavar="EXTRA", help="Name of the extra: cpu, gpu, ...")],
    constraint: Annotated[
        Path | None,
        typer.Option(
            "--constraint", "-c", metavar="FILE", help="File with version pins for pip; default: none."
        ),
    ] = None,
) -> None:
    """Install one extra into the environment that runs this command."""
    if common.offline:
        raise UsageError("an installation needs the network, and --offline is set", hint="remove --offline")
    installation.install(extra, installation.Environment(constraint=constraint), common.out.note)
    common.out.success(f"Installed coldstart[{extra}]", then="coldstart doctor")
