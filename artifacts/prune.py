"""Remove old versions and whatever nothing refers to.

The index shrinks first, so no listed bundle loses a blob.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from coldstart.artifacts import blobs, oci
from coldstart.artifacts.errors import BundleError, named_os_errors
from coldstart.artifacts.limits import LIMITS
from coldstart.artifacts.oci_layout import OciLayout
from coldstart.artifacts.staging import abandoned


@dataclass(frozen=True, slots=True)
class Pruned:
    """What went.

    Bundles, files, and the bytes they held; `note` says why blobs were left alone, if they were; `paths` are the files.
    """

    removed: tuple[oci.Descriptor, ...]
    files: int
    freed: int
    note: str | None = None
    paths: tuple[Path, ...] = ()


def prune(
    layout: OciLayout, doomed: Callable[[Sequence[oci.Descriptor]], set[str]], *, dry_run: bool
) -> Pruned:
    """Remove the entries whose digests `doomed` names, then collect the unreferenced."""
    if not layout.exists:
        return Pruned((), 0, 0)
    layout.create()
    with named_os_errors("pruning"), layout.exclusive():
        entries = layout.entries()
        gone = doomed(entries)
        kept = _with_live_subject(layout, [entry for entry in entries if entry.digest not in gone])
        garbage, note = _garbage(layout, kept)
        freed = sum(path.lstat().st_size for path in garbage if not path.is_dir())
        if not dry_run:
            if kept != entries:
                layout.write_index(kept)
            _remove(garbage)
        removed = tuple(entry for entry in entries if entry.digest in gone)
        return Pruned(removed, len(garbage), freed, note, tuple(garbage))


def _with_live_subject(layout: OciLayout, kept: list[oci.Descriptor]) -> list[oci.Descriptor]:
    alive = {entry.digest for entry in kept}
    return [entry for entry in kept if _subject(layout, entry) in (alive | {None})]


def _subject(layout: OciLayout, entry: oci.Descriptor) -> str | None:
    if entry.artifact_type not in oci.SIGNATURE_TYPES:
        return None
    try:
        subject = _image(layout, entry).subject
    except BundleError:
        return ""  # A signature that cannot be read vouches for nothing.
    return subject.digest if subject else ""


def _image(layout: OciLayout, entry: oci.Descriptor) -> oci.ImageManifest:
    return oci.parse_manifest(blobs.read(layout.root, entry.digest, entry.size, cap=LIMITS.manifest))


def _garbage(layout: OciLayout, kept: list[oci.Descriptor]) -> tuple[list[Path], str | None]:
    leftovers = [*abandoned(layout), *layout.root.glob(".*.partial"), *layout.blobs.glob(".*.partial")]
    if strange := layout.strange():
        return leftovers, f"no blob was removed, because {strange} entries are of a newer release"
    try:
        alive = {blob.digest for entry in kept for blob in (entry, *_image(layout, entry).blobs)}
    except BundleError as error:
        note = f"no blob was removed, because a manifest cannot be read: {error.message}"
        return leftovers, note
    names = {digest.removeprefix("sha256:") for digest in alive}
    return leftovers + [path for path in sorted(layout.blobs.iterdir()) if path.name not in names], None


def _remove(garbage: list[Path]) -> None:
    for path in garbage:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
