"""OCI archive with one or more bundles: an uncompressed tar of an image layout.

import(export(b)) has the digest of b, and equal bundles export to equal bytes. Blobs stream.
"""

from __future__ import annotations

import io
import shlex
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from coldstart.artifacts import blobs, canonical, files, oci, tar
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.bundle_source import LayoutSource, list_signatures, payloads, small
from coldstart.artifacts.errors import (
    BundleError,
    DestinationExistsError,
    DigestMismatchError,
    InvalidManifestError,
    InvalidTreeError,
    MissingBlobError,
    NotALayoutError,
    named_os_errors,
)
from coldstart.artifacts.limits import LIMITS
from coldstart.artifacts.store import Store

_BLOBS = "blobs/sha256/"


def export_archive(bundles: Sequence[Bundle], path: Path, *, replace: bool = False) -> int:
    """Write `bundles` with their signatures to `path` and return the number of bytes. The file appears complete or not at all.

    Raises DestinationExistsError, DigestMismatchError, MissingBlobError, NoSpaceError, ReadOnlyStoreError.
    """
    if path.exists() and not replace:
        raise DestinationExistsError(
            f"{path.name} exists already", hint="replace it with --force, or name another file with --to"
        )
    partial = path.with_name(f".{path.name}.{uuid4().hex}.partial")
    with named_os_errors(f"writing {path.name}"):
        try:
            with files.create(partial, 0o666) as file:
                _write(bundles, file)
                size = file.tell()
                file.flush()
                files.sync_file(file)
            partial.rename(path)
        finally:
            partial.unlink(missing_ok=True)
        files.sync_directory(path.parent)
    return size


def import_archive(store: Store, path: Path) -> list[Bundle]:
    """Copy every bundle of the archive. Raises NotALayoutError and the errors of TarStream.members and Store.receive."""
    try:
        with closing(ArchiveSource(path)) as source:
            return [store.receive(source, entry) for entry in source.bundles()]
    except (DigestMismatchError, InvalidManifestError, MissingBlobError, NotALayoutError) as error:
        if error.hint == error.default_hint:  # which concerns a stored bundle, or another path
            error.hint = _explain_damage(path, is_archive=not isinstance(error, NotALayoutError))
        raise


def _explain_damage(path: Path, *, is_archive: bool) -> str:
    """Return how to get the archive whole."""
    export = f"coldstart export NAME --to {shlex.quote(path.name)} --force"
    again = f"copy the archive again, or write it again where the bundle is whole: {export}"
    return again if is_archive else f"name a file that coldstart export wrote; if it is one, {again}"


class ArchiveSource:
    """Layout inside a tar file, read in place without unpacking."""

    def __init__(self, path: Path) -> None:
        """Open the archive. Raises NotALayoutError and the errors of TarStream.members."""
        self._file = files.open_regular(path)
        self._found: dict[str, tuple[int, int]] = {}
        try:
            self._scan()
            oci.check_layout(self._small(oci.LAYOUT_FILE, LIMITS.pax_header))
            self.entries = oci.parse_index(self._small(oci.INDEX_FILE, LIMITS.index))
        except InvalidTreeError as error:
            self.close()
            raise NotALayoutError(f"{path.name} is not an OCI archive: {error.message}") from error
        except BaseException:
            self.close()
            raise

    def bundles(self) -> list[oci.Descriptor]:
        """Return the bundles that the archive's index lists."""
        return [entry for entry in self.entries if self._kind(entry) == oci.BUNDLE_TYPE]

    def open(self, blob: oci.Descriptor) -> BinaryIO:
        """Open a blob's bytes in place. Raises MissingBlobError."""
        name = _BLOBS + canonical.check_digest(blob.digest).removeprefix("sha256:")
        if name not in self._found:
            raise MissingBlobError(f"blob {blob.digest} is not in the archive")
        start, size = self._found[name]
        return _slice(self._file, start, start + size)

    def signatures(self, subject: oci.Descriptor) -> Sequence[bytes]:
        """Return the payloads that the archive's index lists."""
        return payloads(self, self.entries, subject)

    def close(self) -> None:
        """Close the archive."""
        self._file.close()

    def _kind(self, entry: oci.Descriptor) -> str | None:
        # The index of another program may lack types; the manifest contains its own.
        if entry.artifact_type is not None:
            return entry.artifact_type
        try:
            return oci.parse_manifest(small(self, entry, LIMITS.manifest)).artifact_type
        except BundleError:
            return None

    def _scan(self) -> None:
        for info in tar.TarStream(self._file).members():
            if info.isreg():
                self._found[info.name] = (info.offset_data, info.size)

    def _small(self, name: str, cap: int) -> bytes:
        if name not in self._found:
            raise NotALayoutError(f"the archive has no {name}")
        start, size = self._found[name]
        self._file.seek(start)
        return files.read_full(self._file, min(size, cap + 1))


class _Slice(io.RawIOBase):
    """Bytes [start, end) of a file with several readers."""

    def __init__(self, file: BinaryIO, start: int, end: int) -> None:
        self._file, self._at, self._end = file, start, end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        self._file.seek(self._at)
        data = self._file.read(min(len(buffer), self._end - self._at))
        self._at += len(data)
        buffer[: len(data)] = data
        return len(data)


def _slice(file: BinaryIO, start: int, end: int) -> BinaryIO:
    return io.BufferedReader(_Slice(file, start, end))


def _write(bundles: Sequence[Bundle], file: BinaryIO) -> None:
    entries, content = contents(bundles)
    for name, data in ((oci.LAYOUT_FILE, oci.LAYOUT), (oci.INDEX_FILE, oci.index_document(entries))):
        tar.append(file, tar.describe(name, len(data)), io.BytesIO(data))
    for blob, bundle in content.values():
        with blobs.open_verified(bundle.layout.root, blob.digest, blob.size) as reader:
            tar.append(file, tar.describe(_BLOBS + blob.digest.removeprefix("sha256:"), blob.size), reader)
            reader.drain()
    file.write(tar.END)


def contents(
    bundles: Sequence[Bundle],
) -> tuple[list[oci.Descriptor], dict[str, tuple[oci.Descriptor, Bundle]]]:
    """Return index entries and blobs (manifests first) of `bundles` and of their signatures."""
    entries: dict[str, oci.Descriptor] = {}
    content: dict[str, tuple[oci.Descriptor, Bundle]] = {}
    for bundle in bundles:
        _ = bundle.manifest
        listed = bundle.layout.entries()
        signed = list_signatures(LayoutSource(bundle.layout), listed, bundle.descriptor)
        for entry, image in [(bundle.descriptor, bundle.image), *signed]:
            entries[entry.digest] = entry
            content |= {blob.digest: (blob, bundle) for blob in (entry, *image.blobs)}
    return list(entries.values()), content
