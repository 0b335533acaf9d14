"""Prune the store, and with it everything on this machine that was derived from the removed bundles."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.errors import BundleError
from coldstart.artifacts.oci import Descriptor
from coldstart.artifacts.store import Store
from coldstart.errors import UsageError
from coldstart.launch import caches, process_snapshot
from coldstart.models import inspection, tiny
from coldstart.system import paths, reclaim
from coldstart.system.paths import Cache
from coldstart.system.proc import locked_directory, scratch
from coldstart.system.snapshot import runtime_image
from coldstart.system.trust import directory_fingerprint, section_claims


@dataclass(frozen=True)
class PruneReport:
    """Removed files and bundles, or those that would be removed with `dry_run`.

    Attributes:
        removed: Digests of the bundles.
        files: Number of files in the store.
        unpacked: Directories of unpacked sections.
        frozen: Directories of snapshots.
        freed_bytes: Size of all of it on disk.
        paths: All files and directories.
        note: Why blobs were retained, None if none was.
    """

    removed: tuple[str, ...]
    files: int
    unpacked: tuple[Path, ...]
    frozen: tuple[Path, ...]
    freed_bytes: int
    note: str | None = None
    paths: tuple[Path, ...] = ()


def prune(cache: Cache, refs: Sequence[str] = (), *, keep: int = 1, dry_run: bool = False) -> PruneReport:
    """Remove bundles, the sections unpacked from them, unusable runtime snapshots, and files of killed servers.

    Args:
        cache: Cache whose bundle store is pruned.
        refs: Bundles to remove. Old versions of other bundles are removed only if this is empty.
        keep: Number of newest versions of each key to retain.
        dry_run: Only report what would be removed.

    Raises:
        BundleNotFoundError: A reference names no bundle.
        AmbiguousReferenceError: A reference names bundles of several keys.
        ReadOnlyStoreError: The store is not writable.
    """
    store = Store(cache.bundles)
    # A name of several keys does not say which of them to remove.
    drop = [store.get(ref, one_key=True) for ref in refs]
    pruned = store.prune(None if drop else keep, drop=drop, dry_run=dry_run, trust=inspection.trust)
    removed = tuple(entry.digest for entry in pruned.removed)
    unpacked = _reclaim_unpacked(cache, store, removed, dry_run)
    frozen = runtime_image.prune(cache.runtimes, dry_run=dry_run)
    live = {bundle.digest for bundle in store.list()}.difference(removed)
    engines = runtime_image.prune_engines(cache.runtimes, live, dry_run=dry_run)
    if not dry_run:
        scratch.sweep()
        process_snapshot.sweep()
        tiny.sweep(cache.models)
        caches.sweep(paths.compiled_dir())
        # Of materializations that were killed.
        locked_directory.sweep(cache.work)
    freed = pruned.freed + unpacked.freed + frozen.freed + engines.freed
    snapshots = (*frozen.paths, *engines.paths)
    every = (*pruned.paths, *unpacked.paths, *snapshots)
    return PruneReport(removed, pruned.files, unpacked.paths, snapshots, freed, pruned.note, every)


def _reclaim_unpacked(
    cache: Cache, store: Store, removed: Collection[str], dry_run: bool
) -> reclaim.Reclaimed:
    """Remove what was unpacked from sections that no remaining bundle has."""
    live = {
        blob.digest.removeprefix("sha256:")
        for bundle in store.list()
        if bundle.digest not in removed
        for blob in _layers(bundle)
    }
    records, shared = paths.state_dir() / "unpacked", [paths.compiled_dir()]
    if any(records.glob("*")):
        with suppress(UsageError):  # A directory of another user contains nothing of this store.
            shared += [paths.frozen_dir(), paths.frozen_dir() / "unpacked"]

    def is_owned(path: Path, digest: str) -> bool:
        if _belongs(path, digest, [cache.unpacked]):
            return True
        return _belongs(path, digest, shared) and section_claims.is_claimed_alone(digest, store.root)

    found = reclaim.reclaim([cache.unpacked, records, *shared], live, dry_run=dry_run, is_owned=is_owned)
    if not dry_run:
        section_claims.give_up(store.root, live)
    return found


def _belongs(path: Path, digest: str, roots: Sequence[Path]) -> bool:
    """Return whether `path` is the section's directory below one of `roots`, or the record of its check."""
    return any(
        path.parent == root or path == directory_fingerprint.record("unpacked", root / digest)
        for root in roots
    )


def _layers(bundle: Bundle) -> tuple[Descriptor, ...]:
    try:
        return bundle.image.layers
    except BundleError:
        return ()  # nothing was ever unpacked from what cannot be read
