"""Write bundles to a store: build a bundle from its sections, or receive a copy of a published bundle.

Blobs are staged in a private directory. Then blobs, manifests and index.json are published under the index lock. If a
process is killed at any time, the index is either the old or the new one, and prune removes the blobs that no index entry
refers to.

The next writer or prune removes the staging directory of a killed writer.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, Protocol, cast
from uuid import uuid4

from coldstart.artifacts import blobs, canonical, files, manifest, oci, trees
from coldstart.artifacts.blobs import VerifiedReader
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.errors import (
    MissingBlobError,
    SectionTableError,
    SectionUnsupportedError,
    TooLargeError,
    translate_os_errors,
)
from coldstart.artifacts.key import Key
from coldstart.artifacts.limits import LIMITS
from coldstart.artifacts.manifest import (
    SECTION_TYPES,
    Encoding,
    Manifest,
    Provenance,
    SectionType,
    parse_manifest,
)
from coldstart.artifacts.oci_layout import BundleSource, OciLayout, read_small_blob
from msgspec.structs import replace

_SIGSTORE = {
    "dev.sigstore.bundle.content": "dsse-envelope",
    "dev.sigstore.bundle.predicateType": "https://sigstore.dev/cosign/sign/v1",
}


class HashingFile:
    """Output file that hashes the bytes written to it and accepts at most `max_bytes`."""

    def __init__(self, file: BinaryIO, max_bytes: int) -> None:
        self._file, self._max_bytes, self.size = file, max_bytes, 0
        self._hash = sha256()

    def write(self, data: bytes | memoryview) -> int:
        """Write all of `data` and return its size. Raises TooLargeError above the limit."""
        view = memoryview(data)
        if self.size + len(view) > self._max_bytes:
            raise TooLargeError(f"the blob exceeds the limit of {self._max_bytes} bytes")
        self._file.write(view)
        self._hash.update(view)
        self.size += len(view)
        return len(view)

    def flush(self) -> None:
        """Do nothing: writes are not buffered here."""

    @property
    def digest(self) -> str:
        """Return the SHA-256 digest of all bytes written, as sha256:<hex>."""
        return "sha256:" + self._hash.hexdigest()


@dataclass(slots=True)
class Staging:
    """Private directory in which one writer stages blobs.

    `blobs` maps the digests of staged blobs, which are not yet in the store, to their files.
    """

    layout: OciLayout
    directory: Path
    blobs: dict[str, Path] = field(default_factory=dict)

    def add_blob(self, data: bytes, media_type: str) -> oci.Descriptor:
        """Stage a small blob and return its descriptor."""
        with self.open_blob() as file:
            file.write(data)
        return oci.Descriptor(media_type, file.digest, file.size)

    def copy_blob(self, reader: VerifiedReader) -> None:
        """Stage a blob from `reader`. Raises DigestMismatchError, NoSpaceError and the errors of `reader`."""
        with reader, self.open_blob() as file:
            while data := reader.read(1 << 20):
                file.write(data)

    @contextmanager
    def open_blob(self) -> Iterator[HashingFile]:
        """Open a new blob for writing. Its digest is known when the block ends. Raises NoSpaceError, TooLargeError."""
        path = self.directory / uuid4().hex
        with translate_os_errors("writing a blob"), files.create_file(path, 0o666) as raw:
            file = HashingFile(raw, LIMITS.blob_bytes)
            try:
                yield file
                raw.flush()
                os.fsync(raw.fileno())
            except BaseException:
                path.unlink(missing_ok=True)
                raise
        self.blobs[file.digest] = path

    def publish(
        self,
        descriptor: oci.Descriptor,
        bundle_manifest: Manifest,
        signatures: Sequence[bytes],
        stored_blobs: Sequence[oci.Descriptor] = (),
    ) -> Bundle:
        """Publish the bundle with the manifest `descriptor`, together with its signature documents.

        `bundle_manifest` is the parsed manifest. `stored_blobs` are already in the store and not staged. A bundle that
        the index already lists keeps its version. Raises NoSpaceError, ReadOnlyStoreError, MissingBlobError.
        """
        signed = [self._stage_signature(descriptor, payload) for payload in signatures]
        last = {descriptor.digest, *(item.digest for item in signed)}
        with self.layout.lock_index():
            for blob in stored_blobs:
                if not blobs.blob_path(self.layout.root, blob.digest).exists():
                    raise MissingBlobError(
                        f"blob {blob.digest} was pruned while the bundle was being written",
                        hint="run the command again",
                    )
            entries = self.layout.read_entries()
            known = next((entry for entry in entries if entry.digest == descriptor.digest), None)
            entry = known or _build_index_entry(descriptor, bundle_manifest, entries)
            staged = sorted(self.blobs.items())
            self.layout.publish_blobs(item for item in staged if item[0] not in last)
            self.layout.publish_blobs(item for item in staged if item[0] in last)
            self.blobs.clear()
            listed = {item.digest for item in entries}
            added = {item.digest: item for item in [entry, *signed] if item.digest not in listed}
            self.layout.write_index([*entries, *added.values()])
        return Bundle(self.layout, entry)

    def _stage_signature(self, subject: oci.Descriptor, payload: bytes) -> oci.Descriptor:
        # sigstore clients recognize signatures by their media type and these annotations.
        layer = self.add_blob(payload, oci.SIGNATURE_TYPE)
        config = self.add_blob(b"{}", oci.EMPTY_TYPE)
        image = oci.ImageManifest(
            oci.SIGNATURE_TYPE, config, (layer,), replace(subject, annotations={}), _SIGSTORE
        )
        entry = self.add_blob(image.serialize(), oci.MANIFEST_TYPE)
        return replace(entry, artifact_type=oci.SIGNATURE_TYPE, annotations={oci.SUBJECT: subject.digest})


def _build_index_entry(
    descriptor: oci.Descriptor, bundle_manifest: Manifest, entries: Sequence[oci.Descriptor]
) -> oci.Descriptor:
    """Return an index entry with a ref name for OCI clients and the next version of the model's name, counted over all keys."""
    name, key = bundle_manifest.provenance.model_name, bundle_manifest.key
    versions = (entry.listed_version for entry in entries if entry.annotations.get(oci.NAME) == name)
    version = 1 + max(versions, default=0)
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:96]
    identity = {oci.NAME: name, oci.KEY: key.digest}
    annotations = {
        **identity,
        oci.REF_NAME: f"{slug}-{key.short_digest}-v{version}",
        oci.VERSION: str(version),
    }
    return replace(descriptor, artifact_type=oci.BUNDLE_TYPE, annotations=annotations)


@contextmanager
def open_staging(layout: OciLayout) -> Iterator[Staging]:
    """Create a staging directory and remove it when the block ends. Raises ReadOnlyStoreError or NoSpaceError."""
    layout.create()
    with ExitStack() as stack:
        with translate_os_errors("preparing to write to the store"):
            owned = files.create_owned_directory(layout.staging_dir, gate=layout.index_lock)
            directory = stack.enter_context(owned)
        yield Staging(layout, directory)


def receive_bundle(layout: OciLayout, source: BundleSource, descriptor: oci.Descriptor) -> Bundle:
    """Copy the bundle with the manifest `descriptor`, and its signatures, from `source` into `layout`, and return the copy.

    The copy has the same digest. Manifest and config are checked before a section is fetched. Blobs that the layout
    already has are not fetched again. `replaced_blobs` of the copy is the number of damaged blobs that were replaced.

    Raises the errors of parse_manifest, DigestMismatchError, MissingBlobError, RemoteFailedError, NoSpaceError,
    ReadOnlyStoreError.
    """
    data = read_small_blob(source, descriptor, LIMITS.manifest_bytes)
    image = oci.parse_manifest(data)
    config = read_small_blob(source, image.config, LIMITS.config_bytes)
    parsed = manifest.parse_manifest(config, image)
    if sum(layer.size for layer in image.layers) > LIMITS.bundle_bytes:
        raise TooLargeError(f"the bundle exceeds the limit of {LIMITS.bundle_bytes} bytes")
    bare = oci.Descriptor(oci.MANIFEST_TYPE, descriptor.digest, descriptor.size)
    every = (bare, *image.blobs)
    with open_staging(layout) as staging:
        blob_errors = {
            blob.digest: blobs.find_blob_error(layout.root, blob.digest, blob.size) for blob in every
        }
        for layer in image.blobs[1:]:
            if blob_errors[layer.digest]:
                staging.copy_blob(VerifiedReader(source.open(layer), layer.digest, layer.size))
        staging.add_blob(config, image.config.media_type)
        staging.add_blob(data, oci.MANIFEST_TYPE)
        stored = [blob for blob in every if blob.digest not in staging.blobs]
        bundle = staging.publish(bare, parsed, source.read_signatures(bare), stored)
    damaged = [error for error in blob_errors.values() if error and not isinstance(error, MissingBlobError)]
    return dataclasses.replace(bundle, replaced_blobs=len(damaged))


class Signer(Protocol):
    """Signer of bundles: `sign` returns the signature document for the digest of a manifest."""

    def sign(self, digest: str) -> bytes: ...


@dataclass
class BundleDraft:
    """Unpublished bundle that Store.open_draft yields. Its files are removed if the block ends without `publish`."""

    key: Key
    staging: Staging
    sections: dict[str, oci.Descriptor] = field(default_factory=dict)

    def add_json(self, name: str, value: object) -> oci.Descriptor:
        """Add a JSON section and return its descriptor.

        Raises SectionTableError, SectionUnsupportedError, InvalidJsonError, TooLargeError or NoSpaceError.
        """
        declared = self._require_type(name, "json")
        data = canonical.serialize(value)
        if len(data) > LIMITS.json_section_bytes:
            raise TooLargeError(
                f"section {name} has {len(data)} bytes; the limit is {LIMITS.json_section_bytes} bytes"
            )
        self.sections[name] = entry = self.staging.add_blob(data, declared.media_type)
        return entry

    def add_tree(self, name: str, directory: Path) -> oci.Descriptor:
        """Add a directory as a tar.zst section and return its descriptor.

        Raises SectionTableError, SectionUnsupportedError, NoSpaceError and the errors of trees.pack_tree.
        """
        declared = self._require_type(name, "tar.zst")
        with self.staging.open_blob() as file:
            trees.pack_tree(directory, cast("BinaryIO", file))
        self.sections[name] = entry = oci.Descriptor(declared.media_type, file.digest, file.size)
        return entry

    def publish(self, provenance: Provenance, *, signer: Signer | None = None) -> Bundle:
        """Publish the bundle, with its signature, as the next version of the model's name. The result is durable.

        Raises NoSpaceError, ReadOnlyStoreError, TooLargeError, InvalidManifestError.
        """
        manifest = Manifest(
            self.key, tuple(self.sections[name] for name in sorted(self.sections)), provenance
        )
        image = manifest.build_image_manifest()
        parse_manifest(
            manifest.serialize_config(), image
        )  # Do not publish a bundle that readers would reject.
        self.staging.add_blob(manifest.serialize_config(), oci.CONFIG_TYPE)
        descriptor = self.staging.add_blob(image.serialize(), oci.MANIFEST_TYPE)
        signatures = [signer.sign(descriptor.digest)] if signer else []
        return self.staging.publish(descriptor, manifest, signatures)

    def _require_type(self, name: str, encoding: Encoding) -> SectionType:
        declared = SECTION_TYPES.get(name)
        if declared is None or declared.encoding != encoding:
            raise SectionUnsupportedError(f"no section type has the name {name} and the encoding {encoding}")
        if name in self.sections:
            raise SectionTableError(f"the bundle already has a section {name}")
        return declared
