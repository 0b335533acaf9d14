"""Remove old versions and files that nothing refers to.

The order permits pruning a full disk: files that no index entry refers to, then the index, then the rest. If there is
still not enough space for the index, the sections of dropped bundles are removed before it is written.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from coldstart.artifacts import oci
from coldstart.artifacts.bundle import Bundle, Trust, superseded
from coldstart.artifacts.errors import BundleError, NoSpaceError, named_os_errors
from coldstart.artifacts.limits import LIMITS
from coldstart.artifacts.oci_layout import OciLayout, is_bundle, small
from coldstart.artifacts.writer import abandoned

_Images = Mapping[str, oci.ImageManifest | BundleError]


@dataclass(frozen=True)
class PruneReport:
    """Files and bundles that were removed or, with `dry_run`, would be removed.

    Attributes:
        removed: Digests of the bundles.
        files: Number of files in the store.
        freed_bytes: Disk space that was freed, in all.
        note: Why some blobs were kept; None if all were removed.
        paths: All files and directories.
        unpacked: Directories of unpacked sections.
        frozen: Directories of snapshots.
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
    """`unreferenced`: no index entry refers to them; `documents`, `sections`: only entries that are dropped do."""

    unreferenced: list[Path]
    documents: list[Path] = field(default_factory=list)
    sections: list[Path] = field(default_factory=list)

    @property
    def paths(self) -> list[Path]:
        return [*self.unreferenced, *self.documents, *self.sections]


def prune(
    layout: OciLayout, keep: int | None, drop: Sequence[Bundle], trust: Trust | None, *, dry_run: bool
) -> PruneReport:
    """Remove all but the best `keep` bundles of each key (None: retain all), `drop`, and files that nothing else refers to."""
    if not layout.exists:
        return PruneReport()
    layout.create()
    with named_os_errors("pruning"), layout.exclusive():
        entries = layout.entries()
        images = {entry.digest: _read_image(layout, entry) for entry in entries}
        known = [Bundle(layout, entry) for entry in entries if is_bundle(layout, entry)]
        gone = {bundle.digest for bundle in drop}
        gone |= superseded(known, keep, trust) if keep is not None else set()
        left = images.keys() - gone
        kept = [entry for entry in entries if entry.digest in left and _is_of(entry, images, left)]
        damaged = next((one for entry in kept if isinstance(one := images[entry.digest], BundleError)), None)
        garbage = _find_garbage(
            layout, {entry.digest for entry in kept}, images, only_leftovers=damaged is not None
        )
        freed = sum(path.lstat().st_size for path in garbage.paths if not path.is_dir())
        if not dry_run:
            _collect(layout, garbage, kept if len(kept) < len(entries) else None)
        why = "no blob was removed, because a manifest cannot be read"
        note = None if damaged is None else f"{why}: {damaged.message}"
        removed = tuple(entry.digest for entry in entries if entry.digest in gone)
        return PruneReport(removed, len(garbage.paths), freed, note, tuple(garbage.paths))


def _collect(layout: OciLayout, garbage: _Garbage, kept: list[oci.Descriptor] | None) -> None:
    remove(garbage.unreferenced)
    if kept is not None:
        try:
            layout.write_index(kept)
        except NoSpaceError:
            # Retain manifests and configs: after a kill, the next prune needs them to decide.
            remove(garbage.sections)
            layout.write_index(kept)
    remove([*garbage.documents, *garbage.sections])


def _read_image(layout: OciLayout, entry: oci.Descriptor) -> oci.ImageManifest | BundleError:
    try:
        return oci.parse_manifest(small(layout, entry, LIMITS.manifest))
    except BundleError as error:
        return error


def _is_of(entry: oci.Descriptor, images: _Images, left: Collection[str]) -> bool:
    """Return whether the entry is no signature, or one of an entry of `left`. One that cannot be read proves nothing."""
    image = images[entry.digest]
    if entry.artifact_type != oci.SIGNATURE_TYPE:
        return True
    return not isinstance(image, BundleError) and image.subject is not None and image.subject.digest in left


def _find_garbage(layout: OciLayout, kept: set[str], images: _Images, *, only_leftovers: bool) -> _Garbage:
    garbage = _Garbage(
        [*abandoned(layout), *layout.root.glob(".*.partial"), *layout.blobs.glob(".*.partial")]
    )
    if only_leftovers:
        return garbage
    alive, documents, sections = set(kept), images.keys() - kept, set[str]()
    for digest, image in images.items():
        if isinstance(image, BundleError):  # A manifest that cannot be read does not prevent its removal.
            continue
        if digest in kept:
            alive |= {blob.digest for blob in image.blobs}
        else:
            documents |= {image.config.digest}
            sections |= {layer.digest for layer in image.layers}
    for path in sorted({*layout.blobs.iterdir()}.difference(garbage.unreferenced)):
        if (digest := f"sha256:{path.name}") not in alive:
            group = garbage.sections if digest in sections else garbage.unreferenced
            (garbage.documents if digest in documents else group).append(path)
    return garbage


def remove(paths: Iterable[Path]) -> None:
    """Remove files, links and directories with their content."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
