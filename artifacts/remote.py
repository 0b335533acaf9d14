"""Push and pull by address: oci://HOST/NAME[:TAG], hf://ORG/REPO[:TAG], or a directory (an image layout)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from coldstart.artifacts import oci
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.bundle_source import BundleSource, LayoutSource
from coldstart.artifacts.directory import pull_directory
from coldstart.artifacts.errors import (
    DigestMismatchError,
    InvalidReferenceError,
    MissingBlobError,
    NotALayoutError,
)
from coldstart.artifacts.oci_layout import OciLayout
from coldstart.artifacts.store import Store

if TYPE_CHECKING:
    from coldstart.artifacts.oci_registry import Repository

OCI, HUB, DIRECTORY = "oci://", "hf://", "dir://"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def push(bundle: Bundle, address: str, *, memory: bool = False) -> str:
    """Send a bundle with its signatures, and return the address from which it can be pulled.

    A bundle with process memory is sent only with `memory`.

    Raises ProcessMemoryError, RemoteDeniedError, RemoteFailedError, InvalidReferenceError, DigestMismatchError, NoSpaceError,
    ReadOnlyStoreError.
    """
    bundle.may_leave(memory)
    if address.startswith(OCI):
        place = _repository(address)
        descriptor = place.push(bundle)
        return f"{OCI}{place.host}/{place.name}@{descriptor.digest}"
    if address.startswith(HUB):
        from coldstart.artifacts import hub

        return HUB + hub.push(bundle, address.removeprefix(HUB))
    target = Store(_directory(address))
    return f"{target.root}@{target.receive(LayoutSource(bundle.layout), bundle.descriptor).digest}"


def push_image(bundle: Bundle, address: str, *, memory: bool = False) -> str:
    """Send a bundle as a container image, which is mounted and not pulled; return its address by digest.

    Raises InvalidReferenceError if the address is not a registry, and the errors of `image.push`.
    """
    from coldstart.artifacts import image

    if not address.startswith(OCI):
        raise InvalidReferenceError(f"{address} is not a registry", hint="use an address oci://HOST/NAME:TAG")
    place = _repository(address)
    return f"{place.host}/{place.name}@{image.push(bundle, place, memory=memory)}"


def pull(store: Store, address: str) -> Bundle:
    """Fetch a bundle with its signatures. From a directory, DIR@sha256:... selects one of several.

    Raises RemoteDeniedError, RemoteFailedError, MissingBlobError, NotALayoutError, AmbiguousReferenceError and the errors
    of Store.receive.
    """
    try:
        return _pull(store, address)
    except (DigestMismatchError, MissingBlobError) as error:
        if error.hint == error.default_hint:  # which repairs a stored bundle
            hint = "pull it from another source, or push it again from where it is whole: coldstart push REF ADDRESS"
            error.hint = hint
        raise


def _pull(store: Store, address: str) -> Bundle:
    if address.startswith(OCI):
        place = _repository(address)
        return store.receive(place, place.resolve())
    if address.startswith(HUB):
        from coldstart.artifacts import hub

        return hub.pull(store, address.removeprefix(HUB))
    path, _, digest = address.partition("@sha256:")
    return pull_directory(store, _directory(path), f"sha256:{digest}" if digest else None)


def source(address: str) -> BundleSource:
    """Return a source of blobs for a repair: a directory, an archive file, or a registry.

    Raises InvalidReferenceError for the hub, which does not serve single blobs; NotALayoutError, RemoteFailedError.
    """
    if address.startswith(OCI):
        return _repository(address)
    if address.startswith(HUB):
        raise InvalidReferenceError(
            "cannot fetch single blobs from the hub", hint="pull into a directory first"
        )
    path = _directory(address)
    if path.is_file():
        from coldstart.artifacts.archive import ArchiveSource

        return ArchiveSource(path)
    if not (path / oci.LAYOUT_FILE).exists():
        raise NotALayoutError(f"{path.name} does not exist, or is not an image layout or archive")
    return LayoutSource(OciLayout(path))


def _directory(address: str) -> Path:
    scheme = _SCHEME.match(address)
    if scheme and scheme[0] != DIRECTORY:
        raise InvalidReferenceError(
            f"unknown scheme {scheme[0]} in an address of bundles",
            hint=f"write {OCI}HOST/NAME[:TAG], {HUB}ORG/REPO[:TAG], {DIRECTORY}PATH, or a path",
        )
    return Path(address.removeprefix(DIRECTORY))


def _repository(address: str) -> Repository:
    from coldstart.artifacts.oci_registry import repository

    return repository(address.removeprefix(OCI))
