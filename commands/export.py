"""Write bundles with their signatures to one OCI archive, which other OCI tools can read."""

from pathlib import Path
from typing import Annotated

import typer
from coldstart.artifacts import remote
from coldstart.artifacts.archive import export_archive
from coldstart.commands._completion import complete_reference
from coldstart.commands._options import Common
from coldstart.commands._options import command as declare
from coldstart.commands._output import count, human_bytes

from coldstart.errors import UsageError


@declare()
def command(
    common: Common,
    refs: Annotated[list[str], typer.Argument(help="Bundles to export.", autocompletion=complete_reference)],
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FILE", help="Archive to write; default: NAME-vN.oci.tar.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing archive.")] = False,
) -> None:
    """Export the bundles and print the command that imports them."""
    if to is not None and remote.is_address(to):
        raise UsageError(
            f"cannot write the archive {to}: it is an address, not a file", hint="coldstart push REF ADDRESS"
        )
    bundles = [common.get_bundle(ref) for ref in refs]
    first = bundles[0]
    path = to or Path(f"{first.name.replace('/', '--')}-v{first.version}.oci.tar")
    with common.out.phase(f"write {path.name}"):
        size = export_archive(bundles, path, replace=force)
    data = {"archive": str(path), "bytes": size, "bundles": [bundle.ref for bundle in bundles]}
    common.out.result(data, str(path))
    outcome = f"Exported {count(len(bundles), 'bundle')}, {human_bytes(size)}"
    common.out.success(outcome, where=str(path), then=f"coldstart import {path}")
