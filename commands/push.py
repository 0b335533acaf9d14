"""Copy a bundle with its signatures to a directory, an OCI registry (oci://) or the Hugging Face hub (hf://)."""

from typing import Annotated

import typer
from coldstart.artifacts import remote
from coldstart.commands._options import SNAPSHOT, Common
from coldstart.commands._options import command as declare

from coldstart.key import inspection


@declare()
def command(
    common: Common,
    ref: Annotated[str, typer.Argument(metavar="REF", help="The bundle to send.")],
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="DIR, oci://HOST/NAME[:TAG] or hf://ORG/REPO[:TAG].")
    ],
    include_snapshot: Annotated[bool, typer.Option("--include-snapshot", help=SNAPSHOT)] = False,
) -> None:
    """Push, and say from where it can be pulled."""
    common.require_network(address)
    bundle = common.store().get(ref, trust=inspection.trust)
    with common.out.phase(f"send {bundle.name}:v{bundle.version}"):
        there = remote.push(bundle, address, memory=include_snapshot)
    common.out.result({"ref": bundle.ref, "address": there}, there)
    common.out.success(f"Pushed {bundle.name}:v{bundle.version}", where=there, then=f"coldstart pull {there}")
