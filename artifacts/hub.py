"""Push and pull through the Hugging Face hub: each bundle is an image layout in the folder named by its tag (latest).

The hub stores the files. Digests are checked here, so a changed file is an error as with any source.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from coldstart.artifacts.archive import pull_directory
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.bundle_source import LayoutSource
from coldstart.artifacts.errors import (
    InvalidReferenceError,
    MissingBlobError,
    RemoteDeniedError,
    RemoteFailedError,
)
from coldstart.artifacts.store import Store

_REFERENCE = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(:(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?")
_DENIED = frozenset({401, 403})


def push(bundle: Bundle, reference: str, hub: Any = None) -> str:
    """Upload to ORG/REPO[:TAG] through `hub` (HfApi by default) and return the full reference.

    Raises RemoteDeniedError, RemoteFailedError, InvalidReferenceError.
    """
    repo, tag = _parse(reference)
    with tempfile.TemporaryDirectory(prefix="coldstart-hub-") as scratch:
        Store(Path(scratch)).receive(LayoutSource(bundle.layout), bundle.descriptor)
        try:
            api = hub or _hub()
            api.create_repo(repo, exist_ok=True)
            private = ".coldstart/**"
            api.upload_folder(repo_id=repo, folder_path=scratch, path_in_repo=tag, ignore_patterns=private)
        except Exception as error:
            raise _named(error, repo) from error
    return f"{repo}:{tag}"


def pull(store: Store, reference: str, hub: Any = None) -> Bundle:
    """Download ORG/REPO[:TAG].

    Raises RemoteDeniedError, RemoteFailedError, MissingBlobError, InvalidReferenceError and the errors of Store.receive.
    """
    repo, tag = _parse(reference)
    with tempfile.TemporaryDirectory(prefix="coldstart-hub-") as scratch:
        try:
            api = hub or _hub()
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
