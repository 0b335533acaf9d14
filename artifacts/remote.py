"""Push and pull by address: oci://HOST/NAME[:TAG], hf://ORG/REPO[:TAG], or a directory (an image layout).

On the hub, each bundle is an image layout in the folder named by its tag (latest). Digests are checked here.
"""

from __future__ import annotations

import os
import re
import shlex
import tempfile
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
        pass

        return HUB + _push_to_hub(bundle, address.removeprefix(HUB))
    target = Store(_directory(address))
    return f"{target.root}@{target.receive(bundle.layout, bundle.descriptor).digest}"


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
        pass

        return _pull_from_hub(store, address.removeprefix(HUB))
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


_REFERENCE = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(:(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?")
_DENIED = frozenset({401, 403})


def _push_to_hub(bundle: Bundle, reference: str) -> str:
    """Upload to ORG/REPO[:TAG] of the hub and return the full reference.

    Raises RemoteDeniedError, RemoteFailedError, InvalidReferenceError.
    """
    repo, tag = _parse(reference)
    with tempfile.TemporaryDirectory(prefix="coldstart-hub-") as scratch:
        Store(Path(scratch)).receive(bundle.layout, bundle.descriptor)
        try:
            api = _hub()
            api.create_repo(repo, exist_ok=True)
            private = ".coldstart/**"
            api.upload_folder(repo_id=repo, folder_path=scratch, path_in_repo=tag, ignore_patterns=private)
        except Exception as error:
            raise _named(error, repo) from error
    return f"{repo}:{tag}"


def _pull_from_hub(store: Store, reference: str) -> Bundle:
    """Download ORG/REPO[:TAG].

    Raises RemoteDeniedError, RemoteFailedError, MissingBlobError, InvalidReferenceError and the errors of Store.receive.
    """
    repo, tag = _parse(reference)
    with tempfile.TemporaryDirectory(prefix="coldstart-hub-") as scratch:
        try:
            api = _hub()
            api.snapshot_download(repo, allow_patterns=[f"{tag}/*"], local_dir=scratch)
        except Exception as error:
            raise _named(error, repo) from error
        if not (Path(scratch) / tag).is_dir():
            raise MissingBlobError(f"{repo} has no bundle {tag}", hint=f"list the files of {repo} on the hub")
        return pull_directory(store, Path(scratch) / tag)


def _parse(reference: str) -> tuple[str, str]:
    matched = _REFERENCE.fullmatch(reference)
    if not matched:
        raise InvalidReferenceError(f"{reference!r} is not a hub repository", hint="write ORG/REPO[:TAG]")
    return matched["repo"], matched["tag"] or "latest"


def _named(error: Exception, repo: str) -> RemoteFailedError:
    status = getattr(getattr(error, "response", None), "status_code", None)
    kind = RemoteDeniedError if status in _DENIED else RemoteFailedError
    return kind(f"the hub request for {repo} failed: {type(error).__name__}: {str(error)[:200]}")


def _hub() -> Any:
    from huggingface_hub import HfApi

    return HfApi()
