"""Bundles in image layouts: a directory, or an OCI archive, which is an uncompressed tar of one.

import(export(b)) has the digest of b, and equal bundles export to equal bytes. Blobs stream.
"""

from __future__ import annotations

import io
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from coldstart.artifacts import blobs, files, oci, tar, trees
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.bundle_source import LayoutSource, list_signatures
from coldstart.artifacts.errors import (
    AmbiguousReferenceError,
    DestinationExistsError,
    DigestMismatchError,
    InvalidManifestError,
    InvalidTreeError,
    MissingBlobError,
    NotALayoutError,
    named_os_errors,
)
from coldstart.artifacts.staging import staging
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
        _write(bundles, file)
        return file.tell()


def import_archive(store: Store, path: Path) -> list[Bundle]:
    """Copy every bundle of the archive, which is unpacked beside the store and thus needs its size twice meanwhile.

    Raises NotALayoutError and the errors of TarStream.members and Store.receive.
    """
    try:
        with staging(store.layout) as place:
            other = _unpack(path, place.directory / "archive")
            return [store.receive(LayoutSource(other.layout), bundle.descriptor) for bundle in other.list()]
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
    return store.receive(LayoutSource(other.layout), newest.descriptor)


def _unpack(path: Path, directory: Path) -> Store:
    directory.mkdir()
    try:
        with files.open_regular(path) as file, named_os_errors(f"unpacking {path.name}"):
            trees.read_members(tar.TarStream(file), directory)
    except InvalidTreeError as error:
        raise NotALayoutError(f"{path.name} is not an OCI archive: {error.message}") from error
    if not (unpacked := Store(directory)).layout.exists:
        raise NotALayoutError(f"{path.name} has no {oci.LAYOUT_FILE}")
    return unpacked


def _explain_damage(path: Path, *, is_archive: bool) -> str:
    """Return how to get the archive whole."""
    export = f"coldstart export NAME --to {shlex.quote(path.name)} --force"
    again = f"copy the archive again, or write it again where the bundle is whole: {export}"
    return again if is_archive else f"use a file that coldstart export wrote; if it is one, {again}"


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
