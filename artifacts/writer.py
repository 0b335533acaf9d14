"""Write bundles: a draft of the sections, or a bundle that is received from elsewhere.

Blobs go to a private directory, then blobs, manifests and index.json are published under the index lock.

A writer that is killed at any instruction leaves the old index or the new one; prune removes blobs that no entry names. Its
staging directory is in use while its lock is held. The kernel drops the lock when the writer dies, and prune removes it.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
    named_os_errors,
)
from coldstart.artifacts.key import Key
from coldstart.artifacts.limits import LIMITS
from coldstart.artifacts.manifest import (
    SECTION_TYPES,
    Encoding,
    Manifest,
    Provenance,
    SectionType,
    parse,
)
from coldstart.artifacts.oci_layout import BundleSource, OciLayout, small
from msgspec.structs import replace

_LOCK = "lock"
_SIGSTORE = {
    "dev.sigstore.bundle.content": "dsse-envelope",
    "dev.sigstore.bundle.predicateType": "https://sigstore.dev/cosign/sign/v1",
}


class HashingFile:
    """New file that hashes its bytes."""

    def __init__(self, file: BinaryIO, cap: int) -> None:
        self._file, self._cap, self.size = file, cap, 0
        self._hash = sha256()

    def write(self, data: bytes | memoryview) -> int:
        """Write all of `data`. Raises TooLargeError above the limit."""
        view = memoryview(data)
        if self.size + len(view) > self._cap:
            raise TooLargeError(f"more than {self._cap} bytes")
        self._file.write(view)
        self._hash.update(view)
        self.size += len(view)
        return len(view)

    def flush(self) -> None:
        """Do nothing: writes are not buffered here."""

    @property
    def digest(self) -> str:
        """Return sha256:<hex> of all written bytes."""
        return "sha256:" + self._hash.hexdigest()


@dataclass(slots=True)
class Staging:
    """Private directory of a writer, with written blobs that are not yet part of the store, by digest."""

    layout: OciLayout
    directory: Path
    blobs: dict[str, Path] = field(default_factory=dict)

    def add_blob(self, data: bytes, media_type: str) -> oci.Descriptor:
        """Stage a small blob."""
        with self.file() as file:
            file.write(data)
        return oci.Descriptor(media_type, file.digest, file.size)

    def copy(self, reader: VerifiedReader) -> None:
        """Stage a blob from elsewhere. Raises DigestMismatchError, NoSpaceError and the errors of its source."""
        with reader, self.file() as file:
            while data := reader.read(1 << 20):
                file.write(data)

    @contextmanager
    def file(self, cap: int = LIMITS.blob) -> Iterator[HashingFile]:
        """Stage a blob by writing to it.

        Its digest is known once the block ends. Raises NoSpaceError, TooLargeError.
        """
        path = self.directory / uuid4().hex
        with named_os_errors("writing a blob"), files.create(path, 0o666) as raw:
            file = HashingFile(raw, cap)
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
        described: Manifest,
        signatures: Sequence[bytes],
        stored: Sequence[oci.Descriptor] = (),
    ) -> Bundle:
        """Publish the bundle whose manifest is `descriptor`, together with signature documents about it.

        `described` is that manifest. Blobs in `stored` are not staged, because the store has them. A bundle
        that the index lists already keeps its version. Raises NoSpaceError, ReadOnlyStoreError, MissingBlobError.
        """
        signed = [self._stage_signature(descriptor, payload) for payload in signatures]
        last = {descriptor.digest, *(item.digest for item in signed)}
        with self.layout.exclusive():
            for blob in stored:
                if not blobs.blob_path(self.layout.root, blob.digest).exists():
                    raise MissingBlobError(f"blob {blob.digest} was pruned meanwhile", hint="try again")
            entries = self.layout.entries()
            known = next((entry for entry in entries if entry.digest == descriptor.digest), None)
            entry = known or _entry(descriptor, described, entries)
            staged = sorted(self.blobs.items())
            self.layout.place(item for item in staged if item[0] not in last)
            self.layout.place(item for item in staged if item[0] in last)
            self.blobs.clear()
            listed = {item.digest for item in entries}
            added = {item.digest: item for item in [entry, *signed] if item.digest not in listed}
            self.layout.write_index([*entries, *added.values()])
        return Bundle(self.layout, entry)

    def _stage_signature(self, subject: oci.Descriptor, payload: bytes) -> oci.Descriptor:
        # sigstore's clients find a bundle by the types, and by these annotations whether it is one of theirs.
        layer = self.add_blob(payload, oci.SIGNATURE_TYPE)
        config = self.add_blob(b"{}", oci.EMPTY_TYPE)
        image = oci.ImageManifest(oci.SIGNATURE_TYPE, config, (layer,), subject.bare(), _SIGSTORE)
        entry = self.add_blob(image.document(), oci.MANIFEST_TYPE)
        return replace(entry, artifact_type=oci.SIGNATURE_TYPE, annotations={oci.SUBJECT: subject.digest})


def _entry(
    descriptor: oci.Descriptor, described: Manifest, entries: Sequence[oci.Descriptor]
) -> oci.Descriptor:
    """Return the index entry with the next version of the model's name, whatever its key, and the ref name for OCI clients."""
    name, key = described.provenance.model_name, described.key
    versions = (entry.listed_version for entry in entries if entry.annotations.get(oci.NAME) == name)
    version = 1 + max(versions, default=0)
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:96]
    identity = {oci.NAME: name, oci.KEY: key.digest}
    annotations = {**identity, oci.REF_NAME: f"{slug}-{key.short}-v{version}", oci.VERSION: str(version)}
    return replace(descriptor, artifact_type=oci.BUNDLE_TYPE, annotations=annotations)


@contextmanager
def staging(layout: OciLayout) -> Iterator[Staging]:
    """Create a staging directory and remove it at the end of the block. Raises ReadOnlyStoreError or NoSpaceError."""
    layout.create()
    # Under the index lock, so that prune cannot collect the directory before its own lock is held.
    with named_os_errors("preparing to write to the store"), layout.exclusive():
        directory = layout.staging / uuid4().hex
        directory.mkdir(mode=0o700)  # Other users must not read a staged file before it has its own mode.
        handle = files.try_lock(directory / _LOCK)
    try:
        yield Staging(layout, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if handle is not None:
            os.close(handle)


def abandoned(layout: OciLayout) -> list[Path]:
    """Return the staging directories whose writer is dead. Call under the index lock."""
    dead = []
    for directory in sorted(layout.staging.iterdir()):
        # A writer creates its lock together with the directory, under the index lock: without a lock it is dead.
        if (directory / _LOCK).is_file():
            if (handle := files.try_lock(directory / _LOCK)) is None:
                continue
            os.close(handle)
        dead.append(directory)
    return dead


def receive(layout: OciLayout, source: BundleSource, descriptor: oci.Descriptor) -> Bundle:
    """Copy the bundle `descriptor` of `source` into `layout`, with its signatures and under the same digest.

    Manifest, config and section table are checked before a section is fetched. Blobs that the layout has are not fetched. The
    result has the number of damaged blobs of `layout` that were replaced.

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
    every = (bare, *image.blobs)
    with staging(layout) as place:
        faults = {blob.digest: blobs.fault(layout.root, blob.digest, blob.size) for blob in every}
        for layer in image.blobs[1:]:
            if faults[layer.digest]:
                place.copy(VerifiedReader(source.open(layer), layer.digest, layer.size))
        place.add_blob(config, image.config.media_type)
        place.add_blob(data, oci.MANIFEST_TYPE)
        stored = [blob for blob in every if blob.digest not in place.blobs]
        bundle = place.publish(bare, parsed, source.signatures(bare), stored)
    damaged = [one for one in faults.values() if one and not isinstance(one, MissingBlobError)]
    return dataclasses.replace(bundle, replaced=len(damaged))


class Signer(Protocol):
    """Signer of bundles, which creates the signature document over a manifest's digest."""

    def sign(self, digest: str) -> bytes: ...


@dataclass
class Draft:
    """Bundle that Store.begin opens. If the `with` block ends without publish(), all files are removed."""

    key: Key
    staging: Staging
    sections: dict[str, oci.Descriptor] = field(default_factory=dict)

    def add_json(self, name: str, value: object) -> oci.Descriptor:
        """Add a JSON section.

        Raises SectionTableError, SectionUnsupportedError, InvalidJsonError, TooLargeError or NoSpaceError.
        """
        declared = self._declared(name, "json")
        data = canonical.dumps(value)
        if len(data) > LIMITS.json_section:
            raise TooLargeError(f"section {name} is {len(data)} bytes, the cap is {LIMITS.json_section}")
        self.sections[name] = entry = self.staging.add_blob(data, declared.media_type)
        return entry

    def add_tree(self, name: str, directory: Path) -> oci.Descriptor:
        """Add a directory as one tar.zst.

        Raises SectionTableError, SectionUnsupportedError, NoSpaceError and the errors of trees.pack.
        """
        declared = self._declared(name, "tar.zst")
        with self.staging.file() as file:
            trees.pack(directory, cast("BinaryIO", file))
        self.sections[name] = entry = oci.Descriptor(declared.media_type, file.digest, file.size)
        return entry

    def publish(self, provenance: Provenance, *, signer: Signer | None = None) -> Bundle:
        """Publish the bundle as the key's next version, durable and complete; the signature is part of the same step.

        Raises NoSpaceError, ReadOnlyStoreError, TooLargeError, InvalidManifestError.
        """
        manifest = Manifest(
            self.key, tuple(self.sections[name] for name in sorted(self.sections)), provenance
        )
        image = manifest.image()
        parse(manifest.config(), image)  # A bundle that no reader accepts must not be published.
        self.staging.add_blob(manifest.config(), oci.CONFIG_TYPE)
        descriptor = self.staging.add_blob(image.document(), oci.MANIFEST_TYPE)
        signatures = [signer.sign(descriptor.digest)] if signer else []
        return self.staging.publish(descriptor, manifest, signatures)

    def _declared(self, name: str, encoding: Encoding) -> SectionType:
        declared = SECTION_TYPES.get(name)
        if declared is None or declared.encoding != encoding:
            raise SectionUnsupportedError(f"no section type has the name {name} and the encoding {encoding}")
        if name in self.sections:
            raise SectionTableError(f"section {name} was added already")
        return declared
