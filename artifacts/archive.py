"""Bundles in image layouts: a directory, or an OCI archive, which is an uncompressed tar of one.

import(export(b)) has the digest of b, and equal bundles export to equal bytes. Blobs stream.
"""

from __future__ import annotations

import io
import shlex
import tarfile
from collections.abc import Sequence
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
    named_os_errors,
)
from coldstart.artifacts.limits import LIMITS
from coldstart.artifacts.oci_layout import is_bundle, list_signatures, payloads
from coldstart.artifacts.store import Store

_BLOBS = "blobs/sha256/"


def export_archive(bundles: Sequence[Bundle], path: Path, *, replace: bool = False) -> int:
    """Write `bundles` with their signatures to `path` and return the number of bytes. The file appears complete or not at all.

    Raises DestinationExistsError, DigestMismatchError, MissingBlobError, NoSpaceError, ReadOnlyStoreError.
    """
    if path.exists() and not replace:
        raise DestinationExistsError(
            f"{path.name} exists already", hint="replace it with --force, or use another file with --to"
        )
    with named_os_errors(f"writing {path.name}"), files.replacing(path, mode=0o666) as file:
        archive = trees.open_writer(file)
        entries, content = _contents(bundles)
        for name, data in ((oci.LAYOUT_FILE, oci.LAYOUT), (oci.INDEX_FILE, oci.index_document(entries))):
            archive.addfile(trees.describe(name, len(data)), io.BytesIO(data))
        for blob, bundle in content.values():
            name = _BLOBS + blob.digest.removeprefix("sha256:")
            with blobs.open_verified(bundle.layout.root, blob.digest, blob.size) as reader:
                try:
                    archive.addfile(trees.describe(name, blob.size), cast("IO[bytes]", reader))
                finally:
                    reader.drain()  # whose error says more than that of an early end
        file.write(trees.END)
        return file.tell()


class _Bounded:
    """File for `tarfile`, which reads a header of any declared size at once."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.tell, self.seek = file, file.tell, file.seek

    def read(self, size: int) -> bytes:
        if size > LIMITS.index:
            raise TooLargeError(f"a tar header of more than {LIMITS.index} bytes")
        return self._file.read(size)


class ArchiveSource:
    """OCI archive as a source: its documents and blobs are read where they lie. Other members are ignored."""

    def __init__(self, file: BinaryIO) -> None:
        """Read the headers of the open archive `file`. Raises NotALayoutError, TooLargeError."""
        self._members: dict[str, tarfile.TarInfo] = {}
        try:
            self._archive = tarfile.TarFile(fileobj=cast("IO[bytes]", _Bounded(file)))
            while (info := self._archive.next()) is not None:
                self._archive.members.clear()  # type: ignore[attr-defined]  # Each header would remain in memory.
                name = info.name.removeprefix("./")
                if name in (oci.LAYOUT_FILE, oci.INDEX_FILE) or name.startswith(_BLOBS):
                    self._members[name] = info
                if len(self._members) > LIMITS.tree_members:
                    raise TooLargeError(f"more than {LIMITS.tree_members} blobs")
        except BundleError:
            raise
        except trees.BROKEN as error:
            raise NotALayoutError(f"malformed tar archive: {error}") from error
        oci.check_layout(self._read(oci.LAYOUT_FILE, LIMITS.pax_header))
        self.entries = oci.parse_index(self._read(oci.INDEX_FILE, LIMITS.index))

    def open(self, blob: oci.Descriptor) -> BinaryIO:
        """Open a blob."""
        return self._open(_BLOBS + blob.digest.removeprefix("sha256:"))

    def signatures(self, subject: oci.Descriptor) -> Sequence[bytes]:
        """Return the payloads that the index lists."""
        return payloads(self, self.entries, subject)

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
            raise NotALayoutError(f"the archive has no readable {name}") from error


def import_archive(store: Store, path: Path) -> list[Bundle]:
    """Copy every bundle of the archive. Raises NotALayoutError and the errors of Store.receive."""
    try:
        with files.open_regular(path) as file:
            source = ArchiveSource(file)
            return [store.receive(source, entry) for entry in source.entries if is_bundle(source, entry)]
    except tarfile.TarError as error:
        raise NotALayoutError(
            f"{path.name} is cut short", hint=_explain_damage(path, is_archive=True)
        ) from error
    except (DigestMismatchError, InvalidManifestError, MissingBlobError, NotALayoutError) as error:
        if error.hint == error.default_hint:  # which concerns a stored bundle, or another path
            error.hint = _explain_damage(path, is_archive=not isinstance(error, NotALayoutError))
        raise


def pull_directory(store: Store, directory: Path, digest: str | None = None) -> Bundle:
    """Copy the bundle `digest` of a layout, or its only bundle; of several versions of one key the newest."""
    if not (other := Store(directory)).layout.exists:
        raise NotALayoutError(f"{directory} is not an image layout")
    matches = [bundle for bundle in other.list() if digest in (None, bundle.digest)]
    if not matches:
        raise NotALayoutError(f"{directory} contains no such bundle")
    if len({bundle.key_digest for bundle in matches}) > 1:
        raise AmbiguousReferenceError(
            f"{directory} contains bundles of several keys", hint="choose one: DIR@sha256:..."
        )
    newest = max(matches, key=lambda bundle: bundle.version)
    return store.receive(other.layout, newest.descriptor)


def _explain_damage(path: Path, *, is_archive: bool) -> str:
    """Return how to get the archive whole."""
    export = f"coldstart export NAME --to {shlex.quote(path.name)} --force"
    again = f"copy the archive again, or write it again where the bundle is whole: {export}"
    return again if is_archive else f"use a file that coldstart export wrote; if it is one, {again}"


def _contents(
    bundles: Sequence[Bundle],
) -> tuple[list[oci.Descriptor], dict[str, tuple[oci.Descriptor, Bundle]]]:
    """Return index entries and blobs (manifests first) of `bundles` and of their signatures."""
    entries: dict[str, oci.Descriptor] = {}
    content: dict[str, tuple[oci.Descriptor, Bundle]] = {}
    for bundle in bundles:
        _ = bundle.manifest
        listed = bundle.layout.entries()
        signed = list_signatures(bundle.layout, listed, bundle.descriptor)
        for entry, image in [(bundle.descriptor, bundle.image), *signed]:
            entries[entry.digest] = entry
            content |= {blob.digest: (blob, bundle) for blob in (entry, *image.blobs)}
    return list(entries.values()), content
