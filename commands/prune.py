"""Remove old versions of bundles, or only the named bundles, and files that nothing uses any more."""

from typing import Annotated

import typer
from coldstart.commands._completion import complete_reference
from coldstart.commands._options import Common
from coldstart.commands._options import command as declare
from coldstart.commands._output import count, human_bytes, one_line

from coldstart.launch import pruning


@declare()
def command(
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
    """Prune the store."""
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
