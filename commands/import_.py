"""Take over every bundle of an archive that coldstart export, or another OCI tool, wrote.

Nothing is executed; code in a bundle runs later only if its signer is trusted.
"""

from pathlib import Path
from typing import Annotated

import typer
from coldstart.artifacts.archive import import_archive
from coldstart.commands._options import Common
from coldstart.commands._options import command as declare
from coldstart.commands._received import report


@declare()
def command(common: Common, file: Annotated[Path, typer.Argument(help="The archive to read.")]) -> None:
    """Import, verified byte by byte."""
    with common.out.phase(f"read {file.name}"):
        bundles = import_archive(common.store(), file)
    report(common, bundles, f"Imported {len(bundles)} bundles")
