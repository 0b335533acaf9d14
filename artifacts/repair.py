"""Repair a bundle, one blob at a time.

A damaged blob is fetched again; of a large one only the damaged 16 MiB chunks are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

from coldstart.artifacts import blobs, oci, ranges
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.bundle_source import BundleSource
from coldstart.artifacts.errors import (
    BundleError,
    DigestMismatchError,
    MissingBlobError,
    RemoteFailedError,
    named_os_errors,
)
from coldstart.artifacts.limits import CHUNK
from coldstart.artifacts.manifest import SectionEntry
from coldstart.artifacts.oci_layout import OciLayout
from coldstart.artifacts.receive import fetch
from coldstart.artifacts.section import blob_mode
from coldstart.artifacts.staging import Staging, staging


@dataclass(frozen=True, slots=True)
class Repair:
    """Outcome for one damaged blob.

    `fetched` bytes were copied from a source. If it is not `repaired`, `subject` cannot be used.
    """

    subject: str
    digest: str
    repaired: bool
    fetched: int
    reason: str


def repair(layout: OciLayout, bundle: Bundle, sources: Sequence[BundleSource]) -> list[Repair]:
    """Repair each damaged blob and return one outcome for each. Raises ReadOnlyStoreError, NoSpaceError.

    If the manifest or config cannot be repaired, the sections are unknown and the list ends there.
    """
    outcomes: list[Repair] = []
    for subject, blob, entry in _parts(bundle):
        fault = blobs.fault(layout.root, blob.digest, blob.size)
        if fault is None:
            continue
        outcome = _repair_blob(layout, sources, subject, blob, entry, fault)
        outcomes.append(outcome)
        if entry is None and not outcome.repaired:
            break
    return outcomes


def _parts(bundle: Bundle) -> Iterator[tuple[str, oci.Descriptor, SectionEntry | None]]:
    yield "manifest", bundle.descriptor, None
    yield "config", bundle.image.config, None
    for entry in bundle.manifest.sections:
        yield entry.type, entry.layer, entry


def _repair_blob(
    layout: OciLayout,
    sources: Sequence[BundleSource],
    subject: str,
    blob: oci.Descriptor,
    entry: SectionEntry | None,
    fault: BundleError,
) -> Repair:
    reasons = [fault.message]
    for source in sources:
        try:
            return Repair(subject, blob.digest, True, _from(layout, source, blob, entry), "repaired")
        except (MissingBlobError, DigestMismatchError, RemoteFailedError) as error:
            reasons.append(f"{error.code}: {error.message}")
    return Repair(subject, blob.digest, False, 0, "; ".join(reasons))


def _from(layout: OciLayout, source: BundleSource, blob: oci.Descriptor, entry: SectionEntry | None) -> int:
    with staging(layout) as place:
        fetched = blob.size
        if entry is None or not entry.chunks or not blobs.blob_path(layout.root, blob.digest).is_file():
            fetch(place, source, blob)
        else:
            fetched = _patch(layout, place, source, blob, entry)
        with layout.exclusive(), named_os_errors("repairing"):
            layout.place(place.blobs.items())
    return fetched


def _patch(
    layout: OciLayout, place: Staging, source: BundleSource, blob: oci.Descriptor, entry: SectionEntry
) -> int:
    fetched = 0
    mode = blob_mode(blob.media_type)
    with (
        blobs.open_unverified(layout.root, blob.digest) as file,
        place.file(cap=blob.size, mode=mode) as target,
    ):
        for number, data in ranges.pieces(file, entry):
            good = sha256(data).hexdigest() == entry.chunks[number]
            target.write(data if good else _chunk(source, blob, number))
            fetched += 0 if good else ranges.span(entry, number)[1]
        if target.digest != blob.digest:
            raise DigestMismatchError(f"blob {blob.digest} is still damaged after repair")
    return fetched


def _chunk(source: BundleSource, blob: oci.Descriptor, number: int) -> bytes:
    with source.open(blob, number * CHUNK) as file:
        return ranges.read_full(file, min(CHUNK, blob.size - number * CHUNK))
