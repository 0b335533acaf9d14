"""List and prune the store, and copy bundles with their signatures to and from archives, directories, registries and hubs."""

import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from coldstart.artifacts import oci, remote
from coldstart.artifacts.archive import export_archive, import_archive
from coldstart.artifacts.bundle import Bundle, find_newer
from coldstart.artifacts.errors import BundleError
from coldstart.commands._completion import complete_reference
from coldstart.commands._options import Common
from coldstart.commands._options import command as declare
from coldstart.commands._output import escape_line, format_bytes, format_count, format_table

from coldstart.errors import CommandFailedError, UsageError
from coldstart.launch import pruning
from coldstart.models import inspection, resolver


@declare()
def list_bundles(common: Common) -> None:
    """List the bundles in the store, oldest first."""
    store = common.store()
    bundles = store.list_bundles()
    listed = [_describe_bundle(bundle) for bundle in bundles]
    brief = "\n".join(f"{data['name']}@{data['digest']}" for data in listed if data["name"])
    headers = ("bundle", "key", "size", "created", "digest", "trusted", "arguments")
    common.out.print_result(
        {"store": str(store.root), "bundles": listed},
        lambda: format_table(headers, [*map(_format_row, listed)]),
        brief=brief,
    )
    if not bundles:
        common.out.print_note(f"No bundle in {store.root}. Next: coldstart materialize tiny-llama")


def _describe_bundle(bundle: Bundle) -> dict[str, Any]:
    annotations = bundle.descriptor.annotations
    identity = {"version": bundle.version, "digest": bundle.digest}
    try:
        provenance = bundle.manifest.provenance
    except BundleError as error:
        # List the other bundles, even if this one is damaged or has a newer format.
        problem = {"trusted": False, "problem": f"{error.message} [{error.code}]"}
        return {"name": annotations.get(oci.NAME), **identity, "key": annotations.get(oci.KEY), **problem}
    trusted = False
    with suppress(BundleError):  # A damaged key file in the trust directory must not prevent the list either.
        trusted = inspection.trust(bundle).is_trusted
    return {
        "name": bundle.name,
        **identity,
        "trusted": trusted,
        "key": bundle.key_digest,
        "size": bundle.size_bytes,
        "created": provenance.created,
        "arguments": list(provenance.arguments),
    }


def _format_row(data: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{data['name'] or '?'}:v{data['version']}",
        str(data["key"] or "?").removeprefix("sha256:")[:12],
        format_bytes(data["size"]) if "size" in data else "-",
        data.get("created") or data["problem"],
        data["digest"].removeprefix("sha256:")[:12],
        "yes" if data["trusted"] else "no",
        shlex.join(data.get("arguments", ())),
    )


@declare()
def prune(
    common: Common,
    refs: Annotated[
        list[str] | None,
        typer.Argument(
            help="References of the bundles to remove; default: old versions of all bundles.",
            autocompletion=complete_reference,
        ),
    ] = None,
    keep: Annotated[
        int, typer.Option("--keep", min=0, help="Number of newest versions to keep for each bundle key.")
    ] = 1,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the bundles and files without removing them.")
    ] = False,
) -> None:
    """Remove old versions of bundles, or only the specified bundles, and all files that are no longer used."""
    done = pruning.prune(common.cache, refs or (), keep=keep, dry_run=dry_run)
    data = {
        "dry_run": dry_run,
        "removed": list(done.removed),
        "files": done.files,
        "unpacked": [str(path) for path in done.unpacked],
        "frozen": [str(path) for path in done.frozen],
        "freed_bytes": done.freed_bytes,
    }
    verb = "Would remove" if dry_run else "Removed"
    bundles, files = format_count(len(done.removed), "bundle"), format_count(done.files, "file")
    counts = f"{bundles}, {files}, {len(done.unpacked)} unpacked and {len(done.frozen)} frozen"
    summary = f"{verb} {counts}, {format_bytes(done.freed_bytes)}"
    listed = [escape_line(str(path)) for path in done.paths] if dry_run else []
    common.out.print_result(data, "\n".join([summary, *done.removed, *listed]), brief="\n".join(done.removed))
    if done.note:
        common.out.warn(done.note)
    if dry_run:
        common.out.print_note("Nothing was removed. Run the command without --dry-run to remove these files.")
    else:
        common.out.print_success("Pruned the store", where=str(common.cache.bundles), then="coldstart list")


@declare()
def export(
    common: Common,
    refs: Annotated[
        list[str],
        typer.Argument(help="References of the bundles to export.", autocompletion=complete_reference),
    ],
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FILE", help="Archive to write; default: NAME-vN.oci.tar.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing archive.")] = False,
) -> None:
    """Write bundles and their signatures to one OCI archive, which other OCI tools can read."""
    if to is not None and remote.looks_like_address(to):
        raise UsageError(
            f"cannot write the archive {to}: the argument is an address, not a file",
            hint="run `coldstart push REF ADDRESS`",
        )
    bundles = [common.get_bundle(ref) for ref in refs]
    first = bundles[0]
    path = to or Path(f"{first.name.replace('/', '--')}-v{first.version}.oci.tar")
    with common.out.show_phase(f"write {path.name}"):
        size = export_archive(bundles, path, replace=force)
    data = {"archive": str(path), "bytes": size, "bundles": [bundle.ref for bundle in bundles]}
    common.out.print_result(data, str(path))
    outcome = f"Exported {format_count(len(bundles), 'bundle')}, {format_bytes(size)}"
    common.out.print_success(outcome, where=str(path), then=f"coldstart import {path}")


@declare()
def import_(common: Common, file: Annotated[Path, typer.Argument(help="OCI archive to read.")]) -> None:
    """Add the bundles of an archive to the store. `coldstart export` or another OCI tool creates the archive.

    The import executes no code. A server runs code from a bundle only if its signer is trusted.
    """
    if not file.is_file():
        is_source = file.is_dir() or remote.looks_like_address(file)
        pull, export = (
            f"run `coldstart pull {shlex.quote(str(file))}`",
            "run `coldstart export NAME --to FILE`",
        )
        hint = pull if is_source else export
        raise UsageError(f"cannot read the archive {file}: the path is not a file", hint=hint)
    with common.out.show_phase(f"read {file.name}"):
        bundles = import_archive(common.store(), file)
    _report_added(common, bundles, f"Imported {format_count(len(bundles), 'bundle')}")


@declare()
def push(
    common: Common,
    ref: Annotated[
        str,
        typer.Argument(
            metavar="REF", help="Reference of the bundle to copy.", autocompletion=complete_reference
        ),
    ],
    address: Annotated[
        str,
        typer.Argument(
            metavar="ADDRESS", help="Destination: DIR, oci://HOST/NAME[:TAG] or hf://ORG/REPO[:TAG]."
        ),
    ],
) -> None:
    """Copy a bundle and its signatures to a directory, an OCI registry (oci://) or the Hugging Face hub (hf://)."""
    common.require_network(address)
    bundle = common.get_bundle(ref)
    with common.out.show_phase(f"send {bundle.name}:v{bundle.version}"):
        destination = remote.push(bundle, address)
    common.out.print_result({"ref": bundle.ref, "address": destination}, destination)
    common.out.print_success(
        f"Pushed {bundle.name}:v{bundle.version}", where=destination, then=f"coldstart pull {destination}"
    )


@declare()
def pull(
    common: Common,
    address: Annotated[
        str,
        typer.Argument(
            metavar="ADDRESS", help="Source: DIR[@sha256:...], oci://HOST/NAME[:TAG] or hf://ORG/REPO[:TAG]."
        ),
    ],
) -> None:
    """Copy a bundle and its signatures from a directory, an OCI registry (oci://) or the Hugging Face hub (hf://)."""
    common.require_network(address)
    with common.out.show_phase(f"fetch {address}"):
        bundle = remote.pull(common.store(), address)
    _report_added(common, [bundle], f"Pulled {bundle.name}:v{bundle.version}")


def _report_added(common: Common, bundles: Sequence[Bundle], outcome: str) -> None:
    """Print the references of added bundles, and warn about each bundle without a trusted signature.

    Raises:
        CommandFailedError: `bundles` is empty.
    """
    if not bundles:
        raise CommandFailedError(
            "no bundle found in the archive or at the address",
            hint="use an exported archive, or the address of a pushed bundle",
        )
    trust_results = [inspection.trust(bundle) for bundle in bundles]
    data = [
        {
            "ref": bundle.ref,
            "version": bundle.version,
            "trusted": result.is_trusted,
            "signer": result.signer,
            "replaced_blobs": bundle.replaced_blobs,
        }
        for bundle, result in zip(bundles, trust_results, strict=True)
    ]
    common.out.print_result({"bundles": data}, "\n".join(bundle.ref for bundle in bundles))
    for bundle, result in zip(bundles, trust_results, strict=True):
        if bundle.replaced_blobs:
            common.out.print_note(
                f"{bundle.name}:v{bundle.version}: {format_count(bundle.replaced_blobs, 'damaged blob')} replaced"
            )
        if not result.is_trusted:
            common.out.warn(
                f"no code in {bundle.name}:v{bundle.version} will run: {result.reason}; to trust its signer: "
                "coldstart trust add FILE"
            )
        elif newer := find_newer(bundle, common.store().list_bundles(), inspection.trust):
            common.out.warn(
                f"{bundle.name}:v{bundle.version} is older than v{newer[0].version}, which is still selected; "
                f"to use the older one: coldstart prune {newer[0].ref}"
            )
    first = bundles[0]
    # The bundle of a directory does not record the path of the directory, which `serve` needs.
    command = "serve" if resolver.can_be_model(first.name) else "inspect"
    common.out.print_success(
        outcome, where=str(common.store().root), then=f"coldstart {command} {first.name}:v{first.version}"
    )
