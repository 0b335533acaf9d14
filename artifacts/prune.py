"""Remove old versions of bundles, and unreferenced files.

The order makes pruning possible on a full disk: remove files that no index entry refers to, replace the index, then
remove the rest. If there is not enough space to write the index, the sections of dropped bundles are removed first.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from coldstart.artifacts import files, oci
from coldstart.artifacts.bundle import Bundle, TrustCheck, find_superseded
from coldstart.artifacts.errors import BundleError, NoSpaceError, translate_os_errors
from coldstart.artifacts.limits import LIMITS
from coldstart.artifacts.oci_layout import OciLayout, is_bundle, read_small_blob

_Images = Mapping[str, oci.ImageManifest | BundleError]


@dataclass(frozen=True)
class PruneReport:
    """Files and bundles that were removed or, with `dry_run`, would be removed.

    Attributes:
        removed: Digests of the removed bundles.
        files: Number of files removed from the store.
        freed_bytes: Total disk space freed, in bytes.
        note: Reason why unreferenced blobs were kept; None if all were removed.
        paths: All removed files and directories.
        unpacked: Removed directories of unpacked sections.
        frozen: Removed directories of snapshots.
    """

    removed: tuple[str, ...] = ()
    files: int = 0
    freed_bytes: int = 0
    note: str | None = None
    paths: tuple[Path, ...] = ()
    unpacked: tuple[Path, ...] = ()
    frozen: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class _Garbage:
    """Files to remove. `documents` and `sections` belong to dropped index entries, and `unreferenced` to no entry."""

    unreferenced: list[Path]
    documents: list[Path] = field(default_factory=list)
    sections: list[Path] = field(default_factory=list)

    @property
    def paths(self) -> list[Path]:
        return [*self.unreferenced, *self.documents, *self.sections]


def prune(
    layout: OciLayout,
    keep: int | None = 1,
    *,
    drop: Sequence[Bundle] = (),
    dry_run: bool = False,
    trust: TrustCheck | None = None,
) -> PruneReport:
    """Remove bundles except the best `keep` of each key (None: keep all), bundles in `drop`, and unreferenced files.

    Return a report of what is removed or, with `dry_run`, would be removed. Bundles that `trust` accepts rank above all
    others. Raises ReadOnlyStoreError.
    """
    if not layout.exists:
        return PruneReport()
    layout.create()
    with translate_os_errors("pruning"), layout.lock_index():
        entries = layout.read_entries()
        images = {entry.digest: _read_image(layout, entry) for entry in entries}
        known = [Bundle(layout, entry) for entry in entries if is_bundle(layout, entry)]
        dropped = {bundle.digest for bundle in drop}
        dropped |= find_superseded(known, keep, trust) if keep is not None else set()
        retained = images.keys() - dropped
        kept = [
            entry for entry in entries if entry.digest in retained and _is_retained(entry, images, retained)
        ]
        damaged = next(
            (image for entry in kept if isinstance(image := images[entry.digest], BundleError)), None
        )
        garbage = _find_garbage(
            layout, {entry.digest for entry in kept}, images, only_leftovers=damaged is not None
        )
        freed = sum(path.lstat().st_size for path in garbage.paths if not path.is_dir())
        if not dry_run:
            _remove_garbage(layout, garbage, kept if len(kept) < len(entries) else None)
        why = "no blob was removed, because a manifest in the store cannot be read"
        note = None if damaged is None else f"{why}: {damaged.message}"
        removed = tuple(entry.digest for entry in entries if entry.digest in dropped)
        return PruneReport(removed, len(garbage.paths), freed, note, tuple(garbage.paths))


def _remove_garbage(layout: OciLayout, garbage: _Garbage, kept: list[oci.Descriptor] | None) -> None:
    remove_paths(garbage.unreferenced)
    if kept is not None:
        try:
            layout.write_index(kept)
        except NoSpaceError:
            # Keep manifests and configs: if this process is killed, the next prune needs them.
            remove_paths(garbage.sections)
            layout.write_index(kept)
    remove_paths([*garbage.documents, *garbage.sections])


def _read_image(layout: OciLayout, entry: oci.Descriptor) -> oci.ImageManifest | BundleError:
    try:
        return oci.parse_manifest(read_small_blob(layout, entry, LIMITS.manifest_bytes))
    except BundleError as error:
        return error


def _is_retained(entry: oci.Descriptor, images: _Images, retained: Collection[str]) -> bool:
    """Return whether the entry is a bundle, or a readable signature of an entry in `retained`."""
    image = images[entry.digest]
    if entry.artifact_type != oci.SIGNATURE_TYPE:
        return True
    return (
        not isinstance(image, BundleError) and image.subject is not None and image.subject.digest in retained
    )


def _find_garbage(layout: OciLayout, kept: set[str], images: _Images, *, only_leftovers: bool) -> _Garbage:
    garbage = _Garbage(
        [
            *files.list_dead_directories(layout.staging_dir, is_locked=True),
            *layout.root.glob(".*.partial"),
            *layout.blobs_dir.glob(".*.partial"),
        ]
    )
    if only_leftovers:
        return garbage
    referenced, documents, sections = set(kept), images.keys() - kept, set[str]()
    for digest, image in images.items():
        if isinstance(
            image, BundleError
        ):  # An unreadable manifest can be removed, but its blobs are unknown.
            continue
        if digest in kept:
            referenced |= {blob.digest for blob in image.blobs}
        else:
            documents |= {image.config.digest}
            sections |= {layer.digest for layer in image.layers}
    for path in sorted({*layout.blobs_dir.iterdir()}.difference(garbage.unreferenced)):
        if (digest := f"sha256:{path.name}") not in referenced:
            group = garbage.sections if digest in sections else garbage.unreferenced
            (garbage.documents if digest in documents else group).append(path)
    return garbage


def remove_paths(paths: Iterable[Path]) -> None:
    """Remove files, links, and directories with their contents."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
