"""Remove old versions of bundles, those named, and whatever nothing refers to any more."""

from typing import Annotated

import typer
from coldstart.commands._options import Common
from coldstart.commands._options import command as declare
from coldstart.commands._output import human_bytes

from coldstart.key import inspection


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
    data = {"dry_run": dry_run, "removed": removed, "files": pruned.files, "freed_bytes": pruned.freed}
    verb = "Would remove" if dry_run else "Removed"
    said = f"{verb} {len(removed)} bundles and {pruned.files} files, {human_bytes(pruned.freed)}"
    common.out.result(data, "\n".join([said, *removed]), brief="\n".join(removed))
    if pruned.note:
        common.out.warn(pruned.note)
    common.out.success("Pruned the store", where=str(store.root), then="coldstart list")
