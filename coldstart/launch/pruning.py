"""Remove old bundles, and the files on this machine that were derived from them.

Invariant: sections of bundles in the store, and files that a running process has mapped, are never removed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from coldstart.artifacts import files
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.errors import BundleError
from coldstart.artifacts.oci import Descriptor
from coldstart.artifacts.prune import PruneReport, remove_paths
from coldstart.artifacts.prune import prune as prune_bundles
from coldstart.artifacts.store import Store
from coldstart.errors import UsageError
from coldstart.launch import process_snapshot
from coldstart.models import inspection, tiny
from coldstart.system import file_state, paths
from coldstart.system.paths import Cache
from coldstart.system.proc import scratch
from coldstart.system.snapshot import runtime_image

# The names of files that a dead writer left contain the digest too: .DIGEST.PID.old, .DIGEST.UUID.partial.
_NAME = re.compile(r"\.?(?P<digest>[0-9a-f]{64})(\..*)?")


def prune(cache: Cache, refs: Sequence[str] = (), *, keep: int = 1, dry_run: bool = False) -> PruneReport:
    """Remove bundles, the sections unpacked from them, unusable runtime snapshots, and files of killed processes.

    Args:
        cache: Cache whose bundle store is pruned.
        refs: Bundles to remove. If empty, old versions of all bundles are removed.
        keep: Number of newest versions to keep for each key.
        dry_run: Whether to only report what would be removed.

    Returns:
        The removed bundles and files, and the freed bytes; with `dry_run`, those that would be removed.

    Raises:
        BundleNotFoundError: A reference matches no bundle.
        AmbiguousReferenceError: A reference matches bundles with different keys.
        ReadOnlyStoreError: The store is not writable.
    """
    store = Store(cache.bundles)
    # A name with bundles of several keys is ambiguous.
    drop = [store.find_by_reference(ref, require_one_key=True) for ref in refs]
    trust, kept = inspection.trust, None if drop else keep
    pruned = prune_bundles(store.layout, kept, drop=drop, dry_run=dry_run, trust=trust)
    remaining = [bundle for bundle in store.list_bundles() if bundle.digest not in pruned.removed]
    unpacked = _find_unpacked(cache, remaining)
    frozen = (
        *files.list_dead_directories(cache.runtimes, runtime_image.PARTIAL),
        *_find_images(cache, remaining),
    )
    freed = pruned.freed_bytes + sum(map(runtime_image.measure_size, (*unpacked, *frozen)))
    if not dry_run:
        remove_paths(unpacked)
        for path in unpacked:
            file_state.locate_record("unpacked", path).unlink(missing_ok=True)
        for path in frozen:
            runtime_image.remove_image(path)
        scratch.remove_dead_directories()
        files.remove_dead_below(paths.runtime_dir(), process_snapshot.PREFIX)
        for generation in cache.models.glob("tiny-v*"):
            with suppress(OSError):  # a cache may be read-only
                files.remove_dead_below(generation, tiny.DRAFT)
        # Remove what killed starts left of copies of sections, and killed materializations.
        files.remove_dead_below(paths.compiled_dir(), "?" * 64 + ".")
        files.remove_dead_below(cache.unfinished_materializations)
    every = (*pruned.paths, *unpacked, *frozen)
    return replace(pruned, unpacked=unpacked, frozen=frozen, freed_bytes=freed, paths=every)


def _find_unpacked(cache: Cache, remaining: Sequence[Bundle]) -> tuple[Path, ...]:
    """Return the unpacked sections that no bundle in the store contains anymore and that no process has mapped."""
    live = {blob.digest.removeprefix("sha256:") for bundle in remaining for blob in _list_layers(bundle)}
    roots = [cache.unpacked, paths.compiled_dir()]
    if (paths.state_dir() / "unpacked").is_dir():
        with suppress(UsageError):  # a directory of another user contains nothing from this store
            roots.append(paths.frozen_dir() / "unpacked")
    dead = [path for root in roots for path, digest in _list_named_entries(root) if digest not in live]
    mapped = _list_mapped_files() if dead else set()
    return tuple(path for path in dead if not _is_mapped(path, mapped))


def _list_layers(bundle: Bundle) -> tuple[Descriptor, ...]:
    try:
        return bundle.image_manifest.layers
    except BundleError:
        return ()  # an unreadable bundle was never unpacked


def _list_named_entries(root: Path) -> Iterator[tuple[Path, str]]:
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if matched := _NAME.fullmatch(path.name):
            yield path, matched["digest"]


def _list_mapped_files() -> set[str]:
    paths: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            paths.update(line.partition("/")[2] for line in maps.read_text(errors="replace").splitlines())
    return paths


def _is_mapped(path: Path, mapped: Collection[str]) -> bool:
    prefix = str(path.resolve()).lstrip("/") + "/"
    return any(name.startswith(prefix) for name in mapped)


def _find_images(cache: Cache, remaining: Sequence[Bundle]) -> Iterator[Path]:
    yield from (
        image.directory for image in runtime_image.list_images(cache.runtimes) if image.obstacle is not None
    )
    kept = {
        runtime_image.choose_engine_image_directory(cache.runtimes, bundle.digest) for bundle in remaining
    }
    root = runtime_image.choose_engine_image_directory(cache.runtimes, "")  # the directory of all of them
    yield from (path for path, _ in _list_named_entries(root) if path not in kept)
