"""Push and pull by address: oci://HOST/NAME[:TAG], hf://ORG/REPO[:TAG], or a directory with an image layout.

On the hub, each bundle is an image layout in a folder named after its tag (default `latest`). Digests are verified here.
"""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coldstart.artifacts.archive import pull_directory
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.errors import (
    DigestMismatchError,
    InvalidReferenceError,
    MissingBlobError,
    RemoteDeniedError,
    RemoteFailedError,
)
from coldstart.artifacts.store import Store

if TYPE_CHECKING:
    from coldstart.artifacts.oci_registry import Repository

OCI, HUB = "oci://", "hf://"
_HUB_REFERENCE = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(:(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
# As in docker, a first component with a dot or a port, or localhost, is a registry.
_REGISTRY = re.compile(
    r"((?:[\w-]+\.)+[\w-]+|localhost)/[\w./-]+:[\w.-]+|(?:[\w-]+\.)*[\w-]+:\d+/[\w./-]+(:[\w.-]+)?"
)


def push(bundle: Bundle, address: str) -> str:
    """Upload a bundle and its signatures, and return the address from which it can be pulled.

    Raises RemoteDeniedError, RemoteFailedError, InvalidReferenceError, DigestMismatchError, NoSpaceError,
    ReadOnlyStoreError.
    """
    if address.startswith(OCI):
        place = _parse_repository(address)
        return f"{OCI}{place.host}/{place.name}@{place.push(bundle).digest}"
    if address.startswith(HUB):
        with _open_hub(address) as (api, repo, tag, scratch):
            Store(scratch).receive_bundle(bundle.layout, bundle.descriptor)
            with _translate_hub_errors(repo):
                api.create_repo(repo, exist_ok=True)
                private = ".coldstart/**"
                api.upload_folder(
                    repo_id=repo, folder_path=str(scratch), path_in_repo=tag, ignore_patterns=private
                )
            return f"{HUB}{repo}:{tag}"
    target = Store(_parse_directory(address))
    return f"{target.root}@{target.receive_bundle(bundle.layout, bundle.descriptor).digest}"


def pull(store: Store, address: str) -> Bundle:
    """Fetch a bundle and its signatures into `store`, and return it. DIR@sha256:... selects one of a directory's bundles.

    Raises RemoteDeniedError, RemoteFailedError, MissingBlobError, NotALayoutError, AmbiguousReferenceError,
    InvalidReferenceError and the errors of Store.receive_bundle.
    """
    try:
        if address.startswith(OCI):
            place = _parse_repository(address)
            return store.receive_bundle(place, place.resolve_manifest())
        if address.startswith(HUB):
            with _open_hub(address) as (api, repo, tag, scratch):
                with _translate_hub_errors(repo):
                    api.snapshot_download(repo, allow_patterns=[f"{tag}/*"], local_dir=str(scratch))
                if not (scratch / tag).is_dir():
                    hint = f"list the files of {repo} on the hub, and use one of its tags: {HUB}{repo}:TAG"
                    raise MissingBlobError(f"repository {repo} has no bundle with tag {tag}", hint=hint)
                return pull_directory(store, scratch / tag)
        path, _, digest = address.partition("@sha256:")
        return pull_directory(store, _parse_directory(path), f"sha256:{digest}" if digest else None)
    except (DigestMismatchError, MissingBlobError) as error:
        if error.hint == error.default_hint:  # The default hint is for a bundle in the store.
            hint = "pull the bundle from another source, or push an intact copy: coldstart push REF ADDRESS"
            error.hint = hint
        raise


def looks_like_address(archive: Path) -> bool:
    """Return whether `archive` looks like an address: it starts with a scheme and no such file exists.

    A single slash is accepted, because `Path` collapses oci://HOST to oci:/HOST.
    """
    return re.match(f"{_SCHEME.pattern}/", str(archive)) is not None and not os.path.lexists(archive)


def _parse_directory(address: str) -> Path:
    """Return the directory that an address names.

    Raises InvalidReferenceError if the address is probably a registry or has a scheme.
    """
    if os.path.lexists(address):
        return Path(address)
    exact = f"for a directory with this name, use {shlex.quote(f'./{address}')}"
    if _REGISTRY.fullmatch(address):
        raise InvalidReferenceError(
            f"the address {address} looks like a registry but has no scheme",
            hint=f"use {OCI}{address}; {exact}",
        )
    if scheme := _SCHEME.match(address.strip()):
        raise InvalidReferenceError(
            f"unknown scheme {scheme[0]} in the address {address}",
            hint=f"use {OCI}HOST/NAME[:TAG] or {HUB}ORG/REPO[:TAG]; {exact}",
        )
    return Path(address)


def _parse_repository(address: str) -> Repository:
    from coldstart.artifacts.oci_registry import parse_repository

    return parse_repository(address.removeprefix(OCI))


@contextmanager
def _open_hub(address: str) -> Iterator[tuple[Any, str, str, Path]]:
    """Yield a hub client, the repository and tag of hf://ORG/REPO[:TAG], and an empty temporary directory.

    Raises InvalidReferenceError.
    """
    from huggingface_hub import HfApi

    reference = address.removeprefix(HUB)
    if not (matched := _HUB_REFERENCE.fullmatch(reference)):
        raise InvalidReferenceError(f"invalid hub repository {reference!r}", hint="use ORG/REPO[:TAG]")
    with tempfile.TemporaryDirectory(prefix="coldstart-hub-") as scratch:
        yield HfApi(), matched["repo"], matched["tag"] or "latest", Path(scratch)


@contextmanager
def _translate_hub_errors(repo: str) -> Iterator[None]:
    """Convert errors of the hub client in the block to RemoteDeniedError or RemoteFailedError."""
    try:
        yield
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        kind = RemoteDeniedError if status in (401, 403) else RemoteFailedError
        raise kind(
            f"the hub request for {repo} failed: {type(error).__name__}: {str(error)[:200]}"
        ) from error
