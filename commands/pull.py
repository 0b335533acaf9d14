"""Copy a bundle with its signatures from a directory, an OCI registry (oci://) or the Hugging Face hub (hf://)."""

from typing import Annotated

import typer
from coldstart.artifacts import remote
from coldstart.commands._options import Common
from coldstart.commands._options import command as declare
from coldstart.commands._received import report


@declare()
def command(
    common: Common,
    address: Annotated[
        str,
        typer.Argument(
            metavar="ADDRESS", help="DIR[@sha256:...], oci://HOST/NAME[:TAG] or hf://ORG/REPO[:TAG]."
        ),
    ],
) -> None:
    """Pull a bundle and verify each digest."""
    common.require_network(address)
    with common.out.phase(f"fetch {address}"):
        bundle = remote.pull(common.store(), address)
    report(common, [bundle], f"Pulled {bundle.name}:v{bundle.version}")
