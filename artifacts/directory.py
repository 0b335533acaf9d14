"""Pull from a directory with an image layout, mounted or downloaded."""

from __future__ import annotations

from pathlib import Path

from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.bundle_source import LayoutSource
from coldstart.artifacts.errors import AmbiguousReferenceError, NotALayoutError
from coldstart.artifacts.store import Store


def pull_directory(store: Store, directory: Path, digest: str | None = None) -> Bundle:
    """Return the bundle `digest` of a layout, or its only bundle; of several versions of one key the newest."""
    other = Store(directory)
    if not other.layout.exists:
        raise NotALayoutError(f"{directory} is not an image layout")
    matches = [bundle for bundle in other.list() if digest in (None, bundle.digest)]
    if not matches:
        raise NotALayoutError(f"{directory} contains no such bundle")
    if len({bundle.key_digest for bundle in matches}) > 1:
        raise AmbiguousReferenceError(
            f"{directory} contains bundles of several keys", hint="choose one: DIR@sha256:..."
        )
    return store.receive(
        LayoutSource(other.layout), max(matches, key=lambda bundle: bundle.version).descriptor
    )
