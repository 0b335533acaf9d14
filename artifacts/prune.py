"""Remove old versions and files that nothing refers to.

The order permits pruning a full disk: files that no index entry refers to, then the index, then the rest. If there is
still not enough space for the index, the sections of dropped bundles are removed before it is written.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from coldstart.artifacts import blobs, oci
from coldstart.artifacts.errors import BundleError, NoSpaceError, named_os_errors
from coldstart.artifacts.limits import LIMITS
from coldstart.artifacts.oci_layout import OciLayout
from coldstart.artifacts.staging import abandoned


@dataclass(frozen=True, slots=True)
class Pruned:
    """Removed bundles, number of removed files, and the bytes that they held.

    `note` is the reason why blobs were retained, if they were. `paths` are the files.
    """

    removed: tuple[oci.Descriptor, ...]
    files: int
    freed: int
    note: str | None = None
    paths: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class _Garbage:
    """`unreferenced`: no index entry refers to them; `documents`, `sections`: only entries that are dropped do."""

    unreferenced: list[Path]
    documents: list[Path] = field(default_factory=list)
    sections: list[Path] = field(default_factory=list)
    note: str | None = None

    @property
    def paths(self) -> list[Path]:
        return [*self.unreferenced, *self.documents, *self.sections]


def prune(
    layout: OciLayout, doomed: Callable[[Sequence[oci.Descriptor]], set[str]], *, dry_run: bool
) -> Pruned:
    """Remove the entries whose digests `doomed` returns, and the files that nothing else refers to."""
    if not layout.exists:
        return Pruned((), 0, 0)
    layout.create()
    with named_os_errors("pruning"), layout.exclusive():
        entries = layout.entries()
        gone = doomed(entries)
        kept = _with_live_subject(layout, [entry for entry in entries if entry.digest not in gone])
        left = {entry.digest for entry in kept}
        dropped = [entry for entry in entries if entry.digest not in left]
        garbage = _garbage(layout, kept, dropped)
        freed = sum(path.lstat().st_size for path in garbage.paths if not path.is_dir())
        if not dry_run:
            _collect(layout, garbage, kept if dropped else None)
        removed = tuple(entry for entry in entries if entry.digest in gone)
        return Pruned(removed, len(garbage.paths), freed, garbage.note, tuple(garbage.paths))


def _collect(layout: OciLayout, garbage: _Garbage, kept: list[oci.Descriptor] | None) -> None:
    _remove(garbage.unreferenced)
    if kept is not None:
        try:
            layout.write_index(kept)
        except NoSpaceError:
            # Retain manifests and configs: after a kill, the next prune needs them to decide.
            _remove(garbage.sections)
            layout.write_index(kept)
    _remove([*garbage.documents, *garbage.sections])


def _with_live_subject(layout: OciLayout, kept: list[oci.Descriptor]) -> list[oci.Descriptor]:
    alive = {entry.digest for entry in kept}
    return [entry for entry in kept if _subject(layout, entry) in (alive | {None})]


def _subject(layout: OciLayout, entry: oci.Descriptor) -> str | None:
    if entry.artifact_type != oci.SIGNATURE_TYPE:
        return None
    try:
        subject = _image(layout, entry).subject
    except BundleError:
        return ""  # a signature that cannot be read proves nothing
    return subject.digest if subject else ""


def _image(layout: OciLayout, entry: oci.Descriptor) -> oci.ImageManifest:
    return oci.parse_manifest(blobs.read(layout.root, entry.digest, entry.size, cap=LIMITS.manifest))


def _garbage(layout: OciLayout, kept: list[oci.Descriptor], dropped: list[oci.Descriptor]) -> _Garbage:
    leftovers = [*abandoned(layout), *layout.root.glob(".*.partial"), *layout.blobs.glob(".*.partial")]
    try:
        alive = {blob.digest for entry in kept for blob in (entry, *_image(layout, entry).blobs)}
    except BundleError as error:
        note = f"no blob was removed, because a manifest cannot be read: {error.message}"
        return _Garbage(leftovers, note=note)
    found = sorted({*layout.blobs.iterdir()}.difference(leftovers))
    dead = {path: f"sha256:{path.name}" for path in found if f"sha256:{path.name}" not in alive}
    return _sorted_out(layout, leftovers, dead, dropped)


def _sorted_out(
    layout: OciLayout, leftovers: list[Path], dead: dict[Path, str], dropped: list[oci.Descriptor]
) -> _Garbage:
    documents, sections = _referred(layout, dropped)
    return _Garbage(
        leftovers + [path for path, digest in dead.items() if digest not in documents | sections],
        [path for path, digest in dead.items() if digest in documents],
        [path for path, digest in dead.items() if digest in sections - documents],
    )


def _referred(layout: OciLayout, entries: list[oci.Descriptor]) -> tuple[set[str], set[str]]:
    """Return the blobs of manifests and configs of `entries`, and those of their layers, as digests."""
    documents = {entry.digest for entry in entries}
    sections: set[str] = set()
    for entry in entries:
        with suppress(BundleError):  # A manifest that cannot be read does not prevent its removal.
            image = _image(layout, entry)
            documents.add(image.config.digest)
            sections |= {layer.digest for layer in image.layers}
    return documents, sections


def _remove(garbage: list[Path]) -> None:
    for path in garbage:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
