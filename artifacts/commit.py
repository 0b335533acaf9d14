"""Publish a staged bundle: blobs, then manifests, then index.json, under the index lock.

A writer killed at any instruction leaves the old index or the new one; prune removes blobs that no entry names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from coldstart.artifacts import oci
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.oci_layout import OciLayout
from coldstart.artifacts.staging import Staging
from msgspec.structs import replace

_SIGSTORE = {
    "dev.sigstore.bundle.content": "dsse-envelope",
    "dev.sigstore.bundle.predicateType": "https://sigstore.dev/cosign/sign/v1",
}


def publish(
    layout: OciLayout,
    staging: Staging,
    descriptor: oci.Descriptor,
    identity: Mapping[str, str],
    signatures: Sequence[bytes],
) -> Bundle:
    """Publish the bundle whose manifest is `descriptor`, together with signature documents about it.

    `identity` holds the NAME and KEY annotations. A bundle that the index lists already keeps its version.
    Raises NoSpaceError, ReadOnlyStoreError.
    """
    signed = [_stage_signature(staging, descriptor, payload) for payload in signatures]
    with layout.exclusive():
        entries = layout.entries()
        known = next((entry for entry in entries if entry.digest == descriptor.digest), None)
        entry = known or _entry(descriptor, identity, next_version(entries, identity[oci.NAME]))
        _place(layout, staging, {descriptor.digest, *(item.digest for item in signed)})
        listed = {item.digest for item in entries}
        added = {item.digest: item for item in [entry, *signed] if item.digest not in listed}
        layout.write_index([*entries, *added.values()])
    return listed_bundle(layout, entry)


def listed_bundle(layout: OciLayout, entry: oci.Descriptor) -> Bundle:
    """Return the bundle of an index entry; nothing is read."""
    return Bundle(layout, entry, entry.version)


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


def _stage_signature(staging: Staging, subject: oci.Descriptor, payload: bytes) -> oci.Descriptor:
    # sigstore's clients find a bundle by the types, and by these annotations whether it is one of theirs.
    layer = staging.put(payload, oci.SIGNATURE_TYPE)
    config = staging.put(b"{}", oci.EMPTY_TYPE)
    image = oci.ImageManifest(oci.SIGNATURE_TYPE, config, (layer,), subject.bare(), _SIGSTORE)
    descriptor = staging.put(image.document(), oci.MANIFEST_TYPE)
    return replace(descriptor, artifact_type=oci.SIGNATURE_TYPE)


def _place(layout: OciLayout, staging: Staging, manifests: set[str]) -> None:
    staged = sorted(staging.blobs.items())
    layout.place(item for item in staged if item[0] not in manifests)
    layout.place(item for item in staged if item[0] in manifests)
    staging.blobs.clear()
