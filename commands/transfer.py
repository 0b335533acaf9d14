"""Move bundles with their signatures: to and from one archive, a directory, a registry, or the hub."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from coldstart.artifacts import remote
from coldstart.artifacts.archive import export_archive, import_archive
from coldstart.artifacts.bundle import Bundle, newer_than
from coldstart.commands._completion import complete_reference
from coldstart.commands._options import Common
from coldstart.commands._options import command as declare
from coldstart.commands._output import count, human_bytes

from coldstart.errors import ColdstartError, CommandFailedError, UsageError
from coldstart.models import inspection, resolver
from coldstart.validate import checks


@declare()
def export(
    common: Common,
    refs: Annotated[list[str], typer.Argument(help="Bundles to export.", autocompletion=complete_reference)],
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FILE", help="Archive to write; default: NAME-vN.oci.tar.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing archive.")] = False,
) -> None:
    """Write bundles with their signatures to one OCI archive, which other OCI tools can read."""
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


@declare()
def import_(common: Common, file: Annotated[Path, typer.Argument(help="Archive to read.")]) -> None:
    """Add the bundles of an archive to the store. coldstart export, or another OCI tool, wrote the archive.

    Nothing is executed. Code in a bundle runs later, only if its signer is trusted.
    """
    if not file.is_file():
        is_source = file.is_dir() or remote.is_address(file)
        hint = f"coldstart pull {shlex.quote(str(file))}" if is_source else "coldstart export NAME --to FILE"
        raise UsageError(f"cannot read the archive {file}: it is not a file", hint=hint)
    with common.out.phase(f"read {file.name}"):
        bundles = import_archive(common.store(), file)
    _report(common, bundles, f"Imported {count(len(bundles), 'bundle')}")


@declare()
def push(
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
    """Copy a bundle with its signatures to a directory, an OCI registry (oci://) or the Hugging Face hub (hf://)."""
    common.require_network(address)
    bundle = common.get_bundle(ref)
    with common.out.phase(f"send {bundle.name}:v{bundle.version}"):
        there = remote.push(bundle, address)
    common.out.result({"ref": bundle.ref, "address": there}, there)
    common.out.success(f"Pushed {bundle.name}:v{bundle.version}", where=there, then=f"coldstart pull {there}")


@declare()
def pull(
    common: Common,
    address: Annotated[
        str,
        typer.Argument(
            metavar="ADDRESS", help="DIR[@sha256:...], oci://HOST/NAME[:TAG] or hf://ORG/REPO[:TAG]."
        ),
    ],
) -> None:
    """Copy a bundle with its signatures from a directory, an OCI registry (oci://) or the Hugging Face hub (hf://)."""
    common.require_network(address)
    with common.out.phase(f"fetch {address}"):
        bundle = remote.pull(common.store(), address)
    _report(common, [bundle], f"Pulled {bundle.name}:v{bundle.version}")


def _report(common: Common, bundles: Sequence[Bundle], outcome: str) -> None:
    """Print the references, and warn for each bundle without a trusted signature.

    Raises CommandFailedError for an empty list.
    """
    if not bundles:
        raise CommandFailedError(
            "the source contains no bundle",
            hint="name an exported archive, or the address of a pushed bundle",
        )
    judged = [inspection.trust(bundle) for bundle in bundles]
    data = [
        {
            "ref": bundle.ref,
            "version": bundle.version,
            "trusted": result.ok,
            "signer": result.signer,
            "replaced_blobs": bundle.replaced,
        }
        for bundle, result in zip(bundles, judged, strict=True)
    ]
    common.out.result({"bundles": data}, "\n".join(bundle.ref for bundle in bundles))
    for bundle, result in zip(bundles, judged, strict=True):
        if bundle.replaced:
            common.out.note(
                f"{bundle.name}:v{bundle.version}: {count(bundle.replaced, 'damaged blob')} replaced"
            )
        if not result.ok:
            common.out.warn(
                f"code in {bundle.name}:v{bundle.version} will not run: {result.reason}; to trust its signer: "
                "coldstart trust add FILE"
            )
        elif newer := newer_than(bundle, common.store().list(), inspection.trust):
            common.out.warn(
                f"{bundle.name}:v{bundle.version} is older than v{newer[0].version}, which is still selected; "
                f"to go back: coldstart prune {newer[0].ref}"
            )
    common.out.success(outcome, where=str(common.store().root), then=_next_command(bundles[0]))


def _next_command(bundle: Bundle) -> str:
    """Return the command that starts a server from the bundle here, or else the one that shows the bundle."""
    try:
        can_serve = (
            resolver.names_model(bundle.name)
            and inspection.read_arguments(bundle) is not None
            and not checks.compare_machine(bundle.key.fields, checks.describe_machine(), bundle.name)
        )
    except ColdstartError:  # vLLM is not installed, or the bundle cannot be read
        can_serve = False
    return f"coldstart {'serve' if can_serve else 'inspect'} {bundle.name}:v{bundle.version}"
