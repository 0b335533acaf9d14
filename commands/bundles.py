"""List and prune the store, and move bundles with their signatures: archives, directories, registries, the hub."""

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
from coldstart.commands._output import count, human_bytes, one_line, table

from coldstart.errors import ColdstartError, CommandFailedError, UsageError
from coldstart.launch import pruning
from coldstart.models import inspection, keys, resolver


@declare()
def list_bundles(common: Common) -> None:
    """List the bundles in the store, in order of publication."""
    store = common.store()
    bundles = store.list_bundles()
    listed = [_describe(bundle) for bundle in bundles]
    brief = "\n".join(f"{data['name']}@{data['digest']}" for data in listed if data["name"])
    headers = ("bundle", "key", "size", "created", "digest", "trusted", "arguments")
    common.out.result(
        {"store": str(store.root), "bundles": listed},
        lambda: table(headers, [*map(_row, listed)]),
        brief=brief,
    )
    if not bundles:
        common.out.note(f"No bundle in {store.root}. Next: coldstart materialize tiny-llama")


def _describe(bundle: Bundle) -> dict[str, Any]:
    says, known = bundle.descriptor.annotations, {"version": bundle.version, "digest": bundle.digest}
    try:
        provenance = bundle.manifest.provenance
    except (
        BundleError
    ) as error:  # A damaged bundle, or one of a newer release, prevents no listing of the others.
        problem = {"trusted": False, "problem": f"{error.message} [{error.code}]"}
        return {"name": says.get(oci.NAME), **known, "key": says.get(oci.KEY), **problem}
    trusted = False
    with suppress(BundleError):  # Neither does a damaged key file in the trust directory.
        trusted = inspection.trust(bundle).ok
    return {
        "name": bundle.name,
        **known,
        "trusted": trusted,
        "key": bundle.key_digest,
        "size": bundle.size_bytes,
        "created": provenance.created,
        "arguments": list(provenance.arguments),
    }


def _row(data: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{data['name'] or '?'}:v{data['version']}",
        str(data["key"] or "?").removeprefix("sha256:")[:12],
        human_bytes(data["size"]) if "size" in data else "-",
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
            help="Bundles to remove; default: the old versions of all bundles.",
            autocompletion=complete_reference,
        ),
    ] = None,
    keep: Annotated[int, typer.Option("--keep", min=0, help="Number of versions of each key to retain.")] = 1,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would be removed without removing it.")
    ] = False,
) -> None:
    """Remove old versions of bundles, or only the named bundles, and files that nothing uses any more."""
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
    bundles, files = count(len(done.removed), "bundle"), count(done.files, "file")
    counts = f"{bundles}, {files}, {len(done.unpacked)} unpacked and {len(done.frozen)} frozen"
    summary = f"{verb} {counts}, {human_bytes(done.freed_bytes)}"
    listed = [one_line(str(path)) for path in done.paths] if dry_run else []
    common.out.result(data, "\n".join([summary, *done.removed, *listed]), brief="\n".join(done.removed))
    if done.note:
        common.out.warn(done.note)
    if dry_run:
        common.out.note("Nothing was removed. To remove it, run the command without --dry-run.")
    else:
        common.out.success("Pruned the store", where=str(common.cache.bundles), then="coldstart list")


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
    if to is not None and remote.looks_like_address(to):
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
        is_source = file.is_dir() or remote.looks_like_address(file)
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
            "replaced_blobs": bundle.replaced_blobs,
        }
        for bundle, result in zip(bundles, judged, strict=True)
    ]
    common.out.result({"bundles": data}, "\n".join(bundle.ref for bundle in bundles))
    for bundle, result in zip(bundles, judged, strict=True):
        if bundle.replaced_blobs:
            common.out.note(
                f"{bundle.name}:v{bundle.version}: {count(bundle.replaced_blobs, 'damaged blob')} replaced"
            )
        if not result.ok:
            common.out.warn(
                f"code in {bundle.name}:v{bundle.version} will not run: {result.reason}; to trust its signer: "
                "coldstart trust add FILE"
            )
        elif newer := find_newer(bundle, common.store().list_bundles(), inspection.trust):
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
            and keys.machine_fields().items() <= bundle.key.fields.items()
        )
    except ColdstartError:  # vLLM is not installed, or the bundle cannot be read
        can_serve = False
    return f"coldstart {'serve' if can_serve else 'inspect'} {bundle.name}:v{bundle.version}"
