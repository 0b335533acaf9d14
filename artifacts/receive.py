"""Copy a bundle from a source. Manifest, config and section table are checked before a section is fetched.

Blobs that the layout already has are linked, others are hashed as they stream; publishing is one step.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import BinaryIO
from uuid import uuid4

from coldstart.artifacts import blobs, commit, manifest, oci
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.bundle_source import BundleSource, small
from coldstart.artifacts.errors import DigestMismatchError, MissingBlobError, TooLargeError
from coldstart.artifacts.limits import LIMITS
from coldstart.artifacts.oci_layout import OciLayout
from coldstart.artifacts.staging import HashingFile, Staging, staging


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
        bundle = commit.publish(layout, place, bare, identity, source.signatures(bare))
    damaged = [one for one in faults.values() if one and not isinstance(one, MissingBlobError)]
    return replace(bundle, replaced=len(damaged))


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
