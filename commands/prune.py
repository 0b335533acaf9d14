"""Remove old versions of bundles, those named, and whatever nothing refers to any more, of killed servers too."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.errors import BundleError
from coldstart.artifacts.oci import Descriptor
from coldstart.artifacts.store import Store
from coldstart.commands._options import Common
from coldstart.commands._options import command as declare
from coldstart.commands._output import human_bytes, one_line

from coldstart.errors import UsageError
from coldstart.launch import process_snapshot
from coldstart.models import inspection
from coldstart.system import paths, reclaim
from coldstart.system.proc import scratch
from coldstart.system.snapshot import runtime_image
from coldstart.system.trust import directory_fingerprint, section_claims


@declare()
def command(
    common: Common,
    refs: Annotated[list[str] | None, typer.Argument(help="Bundles to remove besides old versions.")] = None,
    keep: Annotated[int, typer.Option("--keep", min=0, help="Newest versions of each key to keep.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
) -> None:
    """Prune the store."""
    store = common.store()
    drop = [store.get(ref) for ref in refs or ()]
    # Naming bundles means those and no others: old versions of the rest go only when none is named.
    pruned = store.prune(None if drop else keep, drop=drop, dry_run=dry_run, trust=inspection.trust)
    removed = [entry.digest for entry in pruned.removed]
    unpacked = _unpacked(common, store, removed, dry_run)
    frozen = runtime_image.prune(common.cache.runtimes, dry_run=dry_run)
    if not dry_run:
        scratch.sweep()
        process_snapshot.sweep()
    freed = pruned.freed + unpacked.freed + frozen.freed
    data = {
        "dry_run": dry_run,
        "removed": removed,
        "files": pruned.files,
        "unpacked": [str(path) for path in unpacked.paths],
        "frozen": [str(path) for path in frozen.paths],
        "freed_bytes": freed,
    }
    verb = "Would remove" if dry_run else "Removed"
    counts = f"{len(removed)} bundles, {pruned.files} files, {len(unpacked.paths)} unpacked and {len(frozen.paths)} frozen"
    summary = f"{verb} {counts}, {human_bytes(freed)}"
    listed = [one_line(str(path)) for path in (*pruned.paths, *unpacked.paths, *frozen.paths)]
    lines = [summary, *removed, *(listed if dry_run else ())]
    common.out.result(data, "\n".join(lines), brief="\n".join(removed))
    if pruned.note:
        common.out.warn(pruned.note)
    if dry_run:
        common.out.note("Nothing was removed. Next: coldstart prune")
    else:
        common.out.success("Pruned the store", where=str(store.root), then="coldstart list")


def _unpacked(common: Common, store: Store, removed: list[str], dry_run: bool) -> reclaim.Reclaimed:
    """What was unpacked from sections that no bundle in the store has any more."""
    live = {
        blob.digest.removeprefix("sha256:")
        for bundle in store.list()
        if bundle.digest not in removed
        for blob in _layers(bundle)
    }
    if store.layout.strange():
        return reclaim.Reclaimed((), 0)  # whose sections these are is not known here
    records, shared = paths.state_dir() / "unpacked", [paths.compiled_dir()]
    if any(records.glob("*")):
        with suppress(UsageError):  # a place that is not this user's holds nothing of ours
            shared += [paths.frozen_dir(), paths.frozen_dir() / "unpacked"]

    def is_owned(path: Path, digest: str) -> bool:
        own = common.cache.unpacked
        if path.parent == own or path == directory_fingerprint.record("unpacked", own / digest):
            return True
        in_shared = path.parent in shared or path in [
            directory_fingerprint.record("unpacked", root / digest) for root in shared
        ]
        return in_shared and section_claims.is_claimed_alone(digest, store.root)

    found = reclaim.reclaim(
        [common.cache.unpacked, records, *shared], live, dry_run=dry_run, is_owned=is_owned
    )
    if not dry_run:
        section_claims.give_up(store.root, live)
    return found


def _layers(bundle: Bundle) -> tuple[Descriptor, ...]:
    try:
        return bundle.image.layers
    except BundleError:
        return ()  # nothing was ever unpacked from what cannot be read
