"""Push and pull by address: oci://HOST/NAME[:TAG], hf://ORG/REPO[:TAG], or a directory (an image layout)."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from coldstart.artifacts.archive import pull_directory
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.bundle_source import LayoutSource
from coldstart.artifacts.errors import (
    DigestMismatchError,
    InvalidReferenceError,
    MissingBlobError,
)
from coldstart.artifacts.store import Store

if TYPE_CHECKING:
    from coldstart.artifacts.oci_registry import Repository

OCI, HUB = "oci://", "hf://"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
# As docker: a first component with a dot or a port, or localhost, is a registry. A directory seldom ends with a tag.
_REGISTRY = re.compile(
    r"((?:[\w-]+\.)+[\w-]+|localhost)/[\w./-]+:[\w.-]+|(?:[\w-]+\.)*[\w-]+:\d+/[\w./-]+(:[\w.-]+)?"
)


def push(bundle: Bundle, address: str) -> str:
    """Send a bundle with its signatures, and return the address from which it can be pulled.

    Raises RemoteDeniedError, RemoteFailedError, InvalidReferenceError, DigestMismatchError, NoSpaceError,
    ReadOnlyStoreError.
    """
    if address.startswith(OCI):
        place = _repository(address)
        descriptor = place.push(bundle)
        return f"{OCI}{place.host}/{place.name}@{descriptor.digest}"
    if address.startswith(HUB):
        from coldstart.artifacts import hub

        return HUB + hub.push(bundle, address.removeprefix(HUB))
    target = Store(_directory(address))
    return f"{target.root}@{target.receive(LayoutSource(bundle.layout), bundle.descriptor).digest}"


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


def is_address(archive: Path) -> bool:
    """Return whether the name of an archive starts with a scheme. `Path` has reduced oci://HOST to oci:/HOST."""
    return re.match(f"{_SCHEME.pattern}/", str(archive)) is not None and not os.path.lexists(archive)


def _directory(address: str) -> Path:
    if not os.path.lexists(address):
        _check_path(address)
    return Path(address)


def _check_path(path: str) -> None:
    """Raise InvalidReferenceError for what is probably no path: a registry, or a scheme."""
    exact = f"for a directory of this name: {shlex.quote(f'./{path}')}"
    if _REGISTRY.fullmatch(path):
        raise InvalidReferenceError(
            f"the address {path} names a registry, and has no scheme", hint=f"{OCI}{path}; {exact}"
        )
    if scheme := _SCHEME.match(path.strip()):
        raise InvalidReferenceError(
            f"unknown scheme {scheme[0]} in the address {path}",
            hint=f"write {OCI}HOST/NAME[:TAG] or {HUB}ORG/REPO[:TAG]; {exact}",
        )


def _repository(address: str) -> Repository:
    from coldstart.artifacts.oci_registry import repository

    return repository(address.removeprefix(OCI))
