"""Import and export bundles as OCI archives or as directories with an OCI image layout.

An OCI archive is an uncompressed tar file of a layout. An imported bundle keeps its digest, and exports of equal bundles
have equal bytes. Blobs are streamed.
"""

from __future__ import annotations

import io
import shlex
import tarfile
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import IO, BinaryIO, cast

from coldstart.artifacts import blobs, files, oci, trees
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.errors import (
    AmbiguousReferenceError,
    BundleError,
    DestinationExistsError,
    DigestMismatchError,
    InvalidManifestError,
    MissingBlobError,
    NotALayoutError,
    TooLargeError,
    translate_os_errors,
)
from coldstart.artifacts.limits import LIMITS
from coldstart.artifacts.oci_layout import is_bundle, list_signatures, read_signature_documents
from coldstart.artifacts.store import Store

_BLOBS = "blobs/sha256/"


def export_archive(bundles: Sequence[Bundle], path: Path, *, replace: bool = False) -> int:
    """Write `bundles` and their signatures to an OCI archive, which replaces `path` atomically, and return its size in bytes.

    Raises DestinationExistsError, DigestMismatchError, MissingBlobError, NoSpaceError, ReadOnlyStoreError.
    """
    if path.exists() and not replace:
        raise DestinationExistsError(
            f"{path.name} already exists", hint="replace the file with --force, or use another file with --to"
        )
    with translate_os_errors(f"writing {path.name}"), files.open_replacement(path, mode=0o666) as file:
        archive = trees.open_tar_writer(file)
        entries, content = _collect_contents(bundles)
        for name, data in ((oci.LAYOUT_FILE, oci.LAYOUT), (oci.INDEX_FILE, oci.serialize_index(entries))):
            archive.addfile(trees.build_tar_header(name, len(data)), io.BytesIO(data))
        for blob, bundle in content.values():
            name = _BLOBS + blob.digest.removeprefix("sha256:")
            with blobs.open_verified(bundle.layout.root, blob.digest, blob.size) as reader:
                try:
                    archive.addfile(trees.build_tar_header(name, blob.size), cast("IO[bytes]", reader))
                finally:
                    reader.drain()  # Its error is more precise than that of a truncated file.
        file.write(trees.TAR_END)
        return file.tell()


class _BoundedFile:
    """File wrapper that reads at most `left` bytes, because `tarfile` joins a header in memory however long it is."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.tell, self.seek = file, file.tell, file.seek
        self.left: float = LIMITS.index_bytes

    def read(self, size: int) -> bytes:
        self.left -= size
        if self.left < 0:
            raise TooLargeError(f"a tar header of the archive exceeds {LIMITS.index_bytes} bytes")
        return self._file.read(size)


class ArchiveSource:
    """Bundle source that reads an OCI archive without unpacking it. Other entries in the archive are ignored."""

    def __init__(self, file: BinaryIO) -> None:
        """Read all headers of the open archive `file`. Raises NotALayoutError, TooLargeError."""
        self._members: dict[str, tarfile.TarInfo] = {}
        bounded = _BoundedFile(file)
        try:
            self._archive = tarfile.TarFile(fileobj=cast("IO[bytes]", bounded))
            while (info := self._archive.next()) is not None:
                bounded.left = LIMITS.index_bytes
                self._archive.members.clear()  # type: ignore[attr-defined]  # Each header would remain in memory.
                name = info.name.removeprefix("./")
                if name in (oci.LAYOUT_FILE, oci.INDEX_FILE) or name.startswith(_BLOBS):
                    self._members[name] = info
                if len(self._members) > LIMITS.tree_members:
                    raise TooLargeError(f"the archive has more than {LIMITS.tree_members} blobs")
        except BundleError:
            raise
        except trees.MALFORMED_TAR_ERRORS as error:
            raise NotALayoutError(f"malformed tar archive: {error}") from error
        bounded.left = inf
        oci.check_layout_version(self._read(oci.LAYOUT_FILE, LIMITS.pax_header_bytes))
        self.entries = oci.parse_index(self._read(oci.INDEX_FILE, LIMITS.index_bytes))

    def open(self, blob: oci.Descriptor) -> BinaryIO:
        """Open a blob in the archive. Raises MissingBlobError if the archive does not contain the blob."""
        return self._open(_BLOBS + blob.digest.removeprefix("sha256:"))

    def read_signatures(self, subject: oci.Descriptor) -> Sequence[bytes]:
        """Return the documents of the signatures of manifest `subject` that the index lists."""
        return read_signature_documents(self, self.entries, subject)

    def _open(self, name: str) -> BinaryIO:
        info = self._members.get(name)
        if info is None or info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or info.sparse is not None:
            raise MissingBlobError(f"the archive has no file {name}")
        return cast("BinaryIO", self._archive.extractfile(info))

    def _read(self, name: str, cap: int) -> bytes:
        try:
            with self._open(name) as file:
                return file.read(cap + 1)
        except (MissingBlobError, tarfile.TarError) as error:
            raise NotALayoutError(f"the archive does not contain {name} as a regular file") from error


def import_archive(store: Store, path: Path) -> list[Bundle]:
    """Copy every bundle in the archive `path` into `store`, and return the copies.

    Raises NotALayoutError and the errors of receive_bundle.
    """
    try:
        with files.open_regular(path) as file:
            source = ArchiveSource(file)
            return [
                store.receive_bundle(source, entry) for entry in source.entries if is_bundle(source, entry)
            ]
    except tarfile.TarError as error:
        raise NotALayoutError(
            f"{path.name} is truncated", hint=_explain_damage(path, is_archive=True)
        ) from error
    except (DigestMismatchError, InvalidManifestError, MissingBlobError, NotALayoutError) as error:
        if error.hint == error.default_hint:  # The default hint is for a bundle in the store.
            error.hint = _explain_damage(path, is_archive=not isinstance(error, NotALayoutError))
        raise


def pull_directory(store: Store, directory: Path, digest: str | None = None) -> Bundle:
    """Copy a bundle from the image layout in `directory` into `store`, and return the copy.

    Without `digest`, the newest version is copied. All bundles in the layout must then have the same key.
    """
    if not (other := Store(directory)).layout.exists:
        raise NotALayoutError(f"{directory} is not an OCI image layout")
    matches = [bundle for bundle in other.list_bundles() if digest in (None, bundle.digest)]
    if not matches:
        raise NotALayoutError(
            f"{directory} contains no bundle" + (f" with digest {digest}" if digest else "")
        )
    if len({bundle.key_digest for bundle in matches}) > 1:
        raise AmbiguousReferenceError(
            f"{directory} contains bundles with different keys", hint="specify a digest: DIR@sha256:..."
        )
    newest = max(matches, key=lambda bundle: bundle.version)
    return store.receive_bundle(other.layout, newest.descriptor)


def _explain_damage(path: Path, *, is_archive: bool) -> str:
    export = f"coldstart export NAME --to {shlex.quote(path.name)} --force"
    again = f"copy the archive again, or export an intact bundle again: {export}"
    return again if is_archive else f"use a file of `coldstart export`; if {path.name} is one, {again}"


def _collect_contents(
    bundles: Sequence[Bundle],
) -> tuple[list[oci.Descriptor], dict[str, tuple[oci.Descriptor, Bundle]]]:
    """Return the index entries and the blobs of `bundles` and of their signatures, manifests first."""
    entries: dict[str, oci.Descriptor] = {}
    content: dict[str, tuple[oci.Descriptor, Bundle]] = {}
    for bundle in bundles:
        _ = bundle.manifest
        listed = bundle.layout.read_entries()
        signed = list_signatures(bundle.layout, listed, bundle.descriptor)
        for entry, image in [(bundle.descriptor, bundle.image_manifest), *signed]:
            entries[entry.digest] = entry
            content |= {blob.digest: (blob, bundle) for blob in (entry, *image.blobs)}
    return list(entries.values()), content
