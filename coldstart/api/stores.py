"""The bundles of one cache directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from coldstart.api.lookups import PathLike, open_cache
from coldstart.artifacts import archive, remote
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.prune import PruneReport
from coldstart.artifacts.store import Store as BundleStore
from coldstart.launch import pruning
from coldstart.models import inspection


class Store:
    """The bundles of one cache directory. Reading one needs no write permission."""

    def __init__(self, cache_dir: PathLike | None = None) -> None:
        self._cache = open_cache(cache_dir)
        self._bundles = BundleStore(self._cache.bundles)

    @property
    def root(self) -> Path:
        """Directory of the store, an OCI image layout."""
        return self._bundles.root

    def list(self) -> Sequence[Bundle]:
        """Return all bundles in the order of publication."""
        return self._bundles.list()

    def get(self, ref: str) -> Bundle:
        """Return the bundle named by NAME, NAME:vN, NAME@sha256:... or a digest; a trusted version before others.

        Raises:
            BundleNotFoundError, AmbiguousReferenceError, InvalidReferenceError: `ref` does not name one bundle.
        """
        return self._bundles.get(ref, trust=inspection.trust)

    def prune(self, refs: Sequence[str] = (), *, keep: int = 1, dry_run: bool = False) -> PruneReport:
        """Remove `refs`, or without them all but the `keep` newest versions of each key. See `pruning.prune`."""
        return pruning.prune(self._cache, refs, keep=keep, dry_run=dry_run)

    def import_archive(self, path: PathLike) -> Sequence[Bundle]:
        """Copy every bundle of an OCI archive into the store.

        Raises:
            NotALayoutError: The file is not an archive of bundles.
            DigestMismatchError: A blob is damaged.
        """
        return archive.import_archive(self._bundles, Path(path))

    def export_archive(self, refs: Sequence[str], path: PathLike, *, replace: bool = False) -> int:
        """Write bundles with their signatures to one OCI archive and return its size in bytes.

        Raises:
            DestinationExistsError: `path` exists and `replace` is not set.
        """
        bundles = [self.get(ref) for ref in refs]
        return archive.export_archive(bundles, Path(path), replace=replace)

    def push(self, ref: str, address: str) -> str:
        """Send a bundle to a directory, oci://HOST/NAME[:TAG] or hf://ORG/REPO[:TAG], and return its address by digest.

        Raises:
            RemoteDeniedError, RemoteFailedError: The registry refused the request or failed.
        """
        return remote.push(self.get(ref), address)

    def pull(self, address: str) -> Bundle:
        """Copy a bundle from a directory, a registry or the hub into the store, every byte verified.

        Raises:
            RemoteDeniedError, RemoteFailedError: The registry refused the request or failed.
            NotALayoutError: The directory is not a store.
        """
        return remote.pull(self._bundles, address)
