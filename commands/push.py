"""Copy a bundle with its signatures to a directory, an OCI registry (oci://) or the Hugging Face hub (hf://)."""

from typing import Annotated

import typer
from coldstart.artifacts import remote
from coldstart.commands._completion import complete_reference
from coldstart.commands._options import Common
from coldstart.commands._options import command as declare


@declare()
def command(
    common: Common,
    ref: Annotated[
        str,
        typer.Argument(
            metavar="REF", help="Reference of the bundle to send.", autocompletion=complete_reference
        ),
    ],
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="DIR, oci://HOST/NAME[:TAG] or hf://ORG/REPO[:TAG].")
    ],
) -> None:
    """Push the bundle and print the command that pulls it."""
    common.require_network(address)
    bundle = common.get_bundle(ref)
    with common.out.phase(f"send {bundle.name}:v{bundle.version}"):
        there = remote.push(bundle, address)
    common.out.result({"ref": bundle.ref, "address": there}, there)
    common.out.success(f"Pushed {bundle.name}:v{bundle.version}", where=there, then=f"coldstart pull {there}")
