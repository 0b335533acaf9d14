"""Add the bundles of an archive to the store. coldstart export, or another OCI tool, wrote the archive.

Nothing is executed. Code in a bundle runs later, only if its signer is trusted.
"""

import shlex
from pathlib import Path
from typing import Annotated

import typer
from coldstart.artifacts import remote
from coldstart.artifacts.archive import import_archive
from coldstart.commands._options import Common
from coldstart.commands._options import command as declare
from coldstart.commands._output import count
from coldstart.commands._received import report

from coldstart.errors import UsageError


@declare()
def command(common: Common, file: Annotated[Path, typer.Argument(help="Archive to read.")]) -> None:
    """Import the bundles and verify each digest."""
    if not file.is_file():
        name = shlex.quote(str(file))
        if remote.is_address(file):
            why, hint = "it is an address, not a file", "coldstart pull ADDRESS"
        elif file.is_dir():
            why, hint = "it is a directory", f"for the bundles of a directory: coldstart pull {name}"
        else:
            why = "it is not a regular file" if file.exists() else "no such file"
            hint = f"coldstart export NAME --to {name}"
        raise UsageError(f"cannot read the archive {file}: {why}", hint=hint)
    with common.out.phase(f"read {file.name}"):
        bundles = import_archive(common.store(), file)
    report(common, bundles, f"Imported {count(len(bundles), 'bundle')}")
