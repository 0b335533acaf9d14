"""Publish a staged or a copied bundle: blobs, then manifests, then index.json, under the index lock.

A writer killed at any instruction leaves the old index or the new one; prune removes blobs that no entry names.
Of a copy, manifest, config and section table are checked before a section is fetched. Blobs that the layout already has are
linked, others are hashed as they stream.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from typing import BinaryIO
from uuid import uuid4

from coldstart.artifacts import blobs, manifest, oci
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.bundle_source import BundleSource, small
from coldstart.artifacts.errors import DigestMismatchError, MissingBlobError, TooLargeError
from coldstart.artifacts.limits import LIMITS
from coldstart.artifacts.oci_layout import OciLayout
from coldstart.artifacts.staging import HashingFile, Staging, staging
from msgspec.structs import replace

_SIGSTORE = {
    "dev.sigstore.bundle.content": "dsse-envelope",
    "dev.sigstore.bundle.predicateType": "https://sigstore.dev/cosign/sign/v1",
}


def publish(
    layout: OciLayout,
    place: Staging,
    descriptor: oci.Descriptor,
    identity: Mapping[str, str],
    signatures: Sequence[bytes],
) -> Bundle:
    """Publish the bundle whose manifest is `descriptor`, together with signature documents about it.

    `identity` holds the NAME and KEY annotations. A bundle that the index lists already keeps its version.
    Raises NoSpaceError, ReadOnlyStoreError.
    """
    signed = [_stage_signature(place, descriptor, payload) for payload in signatures]
    with layout.exclusive():
        entries = layout.entries()
        known = next((entry for entry in entries if entry.digest == descriptor.digest), None)
        entry = known or _entry(descriptor, identity, next_version(entries, identity[oci.NAME]))
        _place(layout, place, {descriptor.digest, *(item.digest for item in signed)})
        listed = {item.digest for item in entries}
        added = {item.digest: item for item in [entry, *signed] if item.digest not in listed}
        layout.write_index([*entries, *added.values()])
    return Bundle(layout, entry)


def next_version(entries: Sequence[oci.Descriptor], name: str) -> int:
    """Return one more than the newest version of the model's name, whatever its key; 1 for the first."""
    return 1 + max((entry.version for entry in entries if entry.annotations.get(oci.NAME) == name), default=0)


def tag(name: str, key: str, version: int) -> str:
    """Return the ref name that OCI clients see, such as llama2-7b-3fa9c2e11b22-v1: [A-Za-z0-9._-], at most 128."""
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:96]
    return f"{slug}-{key.removeprefix('sha256:')[:12]}-v{version}"


def _entry(descriptor: oci.Descriptor, identity: Mapping[str, str], version: int) -> oci.Descriptor:
    names = {
        oci.REF_NAME: tag(identity[oci.NAME], identity[oci.KEY], version),
        oci.VERSION: str(version),
    }
    return replace(descriptor, artifact_type=oci.BUNDLE_TYPE, annotations={**identity, **names})


def _stage_signature(place: Staging, subject: oci.Descriptor, payload: bytes) -> oci.Descriptor:
    # sigstore's clients find a bundle by the types, and by these annotations whether it is one of theirs.
    layer = place.put(payload, oci.SIGNATURE_TYPE)
    config = place.put(b"{}", oci.EMPTY_TYPE)
    image = oci.ImageManifest(oci.SIGNATURE_TYPE, config, (layer,), subject.bare(), _SIGSTORE)
    descriptor = place.put(image.document(), oci.MANIFEST_TYPE)
    return replace(descriptor, artifact_type=oci.SIGNATURE_TYPE, annotations={oci.SUBJECT: subject.digest})


def _place(layout: OciLayout, place: Staging, manifests: set[str]) -> None:
    staged = sorted(place.blobs.items())
    layout.place(item for item in staged if item[0] not in manifests)
    layout.place(item for item in staged if item[0] in manifests)
    place.blobs.clear()


def receive(layout: OciLayout, source: BundleSource, descriptor: oci.Descriptor) -> Bundle:
    """Copy the bundle `descriptor` of `source` into `layout`, with its signatures and under the same digest.

    The result has the number of damaged blobs of `layout` that were replaced.
    Raises the errors of parsing a manifest, DigestMismatchError, MissingBlobError, RemoteFailedError, NoSpaceError,
    ReadOnlyStoreError.
    """
    data = small(source, descriptor, LIMITS.manifest)
    image = oci.parse_manifest(data)
    config = small(source, image.config, LIMITS.config)
    parsed = manifest.parse(config, image)
    if sum(layer.size for layer in image.layers) > LIMITS.bundle:
        raise TooLargeError(f"the bundle is larger than {LIMITS.bundle} bytes")
    bare = oci.Descriptor(oci.MANIFEST_TYPE, descriptor.digest, descriptor.size)
    with staging(layout) as place:
        faults = {
            blob.digest: blobs.fault(layout.root, blob.digest, blob.size) for blob in (bare, *image.blobs)
        }
        for layer in image.blobs[1:]:
            if faults[layer.digest] or not _link(layout, place, layer):
                fetch(place, source, layer)
        place.put(config, image.config.media_type)
        place.put(data, oci.MANIFEST_TYPE)
        identity = {oci.NAME: parsed.provenance.model_name, oci.KEY: parsed.key.digest}
        bundle = publish(layout, place, bare, identity, source.signatures(bare))
    damaged = [one for one in faults.values() if one and not isinstance(one, MissingBlobError)]
    return dataclasses.replace(bundle, replaced=len(damaged))


def fetch(place: Staging, source: BundleSource, blob: oci.Descriptor) -> None:
    """Stream one blob into staging. Raises DigestMismatchError, MissingBlobError, RemoteFailedError, NoSpaceError."""
    with source.open(blob) as file, place.file(cap=blob.size + 1) as target:
        _copy_exactly(file, target, blob)


def _copy_exactly(file: BinaryIO, target: HashingFile, blob: oci.Descriptor) -> None:
    while target.size <= blob.size and (data := file.read(1 << 20)):
        target.write(data[: blob.size + 1 - target.size])
    if target.size != blob.size or target.digest != blob.digest:
        raise DigestMismatchError(f"blob {blob.digest} of {blob.size} bytes arrived as {target.digest}")


def _link(layout: OciLayout, place: Staging, blob: oci.Descriptor) -> bool:
    # The link keeps the bytes alive if prune runs before the commit.
    path = place.directory / f"{uuid4().hex}.partial"
    try:
        os.link(blobs.blob_path(layout.root, blob.digest), path)
    except OSError:
        return False  # The blob was pruned meanwhile, or the file system has no links: fetch the blob.
    place.blobs[blob.digest] = path
    return True
