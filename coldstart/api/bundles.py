"""Build, find, validate and copy bundles in one cache directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from coldstart.artifacts import archive, remote
from coldstart.artifacts.bundle import Bundle, accept_any
from coldstart.artifacts.prune import PruneReport
from coldstart.artifacts.store import Store as BundleStore
from coldstart.contract.arguments import Arguments
from coldstart.errors import UsageError
from coldstart.launch import pruning
from coldstart.materialize.materialize import MaterializationPlan
from coldstart.materialize.options import Options, Phase
from coldstart.models import inspection, resolver
from coldstart.models.inspection import BundleLookup
from coldstart.scheduling.profiling import BUDGET_S
from coldstart.system.paths import Cache
from coldstart.validate.checks import LEVELS, Level, ValidationReport
from coldstart.validate.responses import PromptSettings
from coldstart.validate.start import REPLAY_SETTINGS
from coldstart.validate.validation import Source, ValidationRequest, validate_all

PathLike = str | Path


def materialize(
    model: str,
    vllm_args: Sequence[str] = (),
    *,
    snapshot: bool = False,
    force: bool = False,
    profile_s: float = BUDGET_S,
    graphs: bool = False,
    revision: str | None = None,
    offline: bool = False,
    cache_dir: PathLike | None = None,
    on_progress: Phase | None = None,
) -> Bundle:
    """Build, verify and publish the bundle of a model, or return the existing bundle of its key.

    Args:
        model: Alias, repository ID, or directory.
        vllm_args: Command-line arguments of vLLM.
        snapshot: Also write a CRIU snapshot of the built engine.
        force: Build a new version even if a bundle exists.
        profile_s: Time limit for measuring step latency, in seconds.
        graphs: Also record CUDA graphs.
        revision: Commit, branch or tag of a hub model.
        offline: Download nothing.
        cache_dir: Cache directory with the bundle store; None: COLDSTART_CACHE_DIR, or `coldstart` in XDG_CACHE_HOME.
        on_progress: Function that takes the name of a stage and returns a context manager, which is entered for the
            duration of that stage and yields a function that is called with each completed step.

    Raises:
        UsageError: An option is invalid, or the model does not exist.
        AuthRequiredError: The hub requires authentication, or `offline` forbids a download.
        CommandFailedError: The engine or the verification run failed, or this machine cannot create a snapshot.
        NoSpaceError: The disk is full.
        ReadOnlyStoreError: The store is not writable.
    """
    options = Options(force, snapshot, profile_s, graphs)
    planned = plan_materialization(
        model, vllm_args, options, revision=revision, offline=offline, cache_dir=cache_dir
    )
    return planned.run(on_progress)


def plan_materialization(
    model: str,
    vllm_args: Sequence[str] = (),
    options: Options | None = None,
    *,
    revision: str | None = None,
    offline: bool = False,
    cache_dir: PathLike | None = None,
) -> MaterializationPlan:
    """Resolve the model and its bundle key without building. Arguments and errors are the same as for `materialize`."""
    lookup = look_up(model, vllm_args, revision=revision, offline=offline, cache_dir=cache_dir)
    return MaterializationPlan(lookup, options or Options())


def find_bundle(
    model: str,
    vllm_args: Sequence[str] = (),
    *,
    revision: str | None = None,
    offline: bool = False,
    untrusted: bool = False,
    cache_dir: PathLike | None = None,
) -> Bundle | None:
    """Return the bundle from which `serve` would start the model on this machine, or None if there is none.

    Args:
        model: Alias, repository ID, or directory.
        vllm_args: Command-line arguments of vLLM.
        revision: Commit, branch or tag of a hub model.
        offline: Download nothing.
        untrusted: Accept a bundle that no trusted key has signed. Its code is not used.
        cache_dir: As for `materialize`.

    Raises:
        UsageError: The model does not exist.
        AuthRequiredError: The hub requires authentication, or `offline` forbids a download.
    """
    return look_up(
        model, vllm_args, revision=revision, offline=offline, cache_dir=cache_dir, untrusted=untrusted
    ).bundle


def validate(
    model_or_reference: str,
    level: Level = "checksum",
    *,
    vllm_args: Sequence[str] = (),
    model: str | None = None,
    replay: PromptSettings = REPLAY_SETTINGS,
    revision: str | None = None,
    offline: bool = False,
    cache_dir: PathLike | None = None,
) -> ValidationReport:
    """Check one bundle, and return the report. Defects of the bundle are findings in the report, not exceptions.

    Args:
        model_or_reference: Reference of a bundle, or a model that is looked up with `vllm_args`.
        level: "manifest", "checksum", "load" (a server starts) or "replay" (its output equals that of vLLM without a
            bundle).
        vllm_args: Command-line arguments of vLLM; empty: those of the bundle.
        model: Directory of the model, for a bundle of a model directory at levels "load" and "replay".
        replay: Prompts, output length and numbers of concurrent requests for level "replay".
        revision: Commit, branch or tag of a hub model.
        offline: Download nothing.
        cache_dir: As for `materialize`.

    Raises:
        UsageError: An option is invalid or contradicts the level, or the model does not exist.
        BundleNotFoundError, AmbiguousReferenceError, InvalidReferenceError: The reference does not identify one bundle.
        NoBundleError: The model has no bundle with these arguments.
        AuthRequiredError: The hub requires authentication, or `offline` forbids a download.
    """
    check_choice("level", level, LEVELS)
    source = Source(check_arguments(vllm_args), model, revision, offline, open_cache(cache_dir))
    words = [model_or_reference]
    (report,) = validate_all(ValidationRequest(words, level, source, replay))
    return report


class Store:
    """Bundle store in one cache directory. Reading requires no write permission."""

    def __init__(self, cache_dir: PathLike | None = None) -> None:
        self._cache = open_cache(cache_dir)
        self._bundles = BundleStore(self._cache.bundles)

    @property
    def root(self) -> Path:
        """Return the root directory of the store, which is an OCI image layout."""
        return self._bundles.root

    def list(self) -> Sequence[Bundle]:
        """Return all bundles in the order of publication."""
        return self._bundles.list_bundles()

    def get(self, ref: str) -> Bundle:
        """Return the bundle for NAME, NAME:vN, NAME@sha256:... or a digest. Trusted versions take precedence.

        Raises:
            BundleNotFoundError, AmbiguousReferenceError, InvalidReferenceError: `ref` does not identify one bundle.
        """
        return self._bundles.find_by_reference(ref, trust=inspection.trust)

    def prune(self, refs: Sequence[str] = (), *, keep: int = 1, dry_run: bool = False) -> PruneReport:
        """Remove the bundles `refs` or, if `refs` is empty, all but the `keep` newest versions of each key. Return a report."""
        return pruning.prune(self._cache, refs, keep=keep, dry_run=dry_run)

    def import_archive(self, path: PathLike) -> Sequence[Bundle]:
        """Import all bundles in an OCI archive into the store, and return them.

        Raises:
            NotALayoutError: The file is not a bundle archive.
            DigestMismatchError: A blob does not match its digest.
        """
        return archive.import_archive(self._bundles, Path(path))

    def export_archive(self, refs: Sequence[str], path: PathLike, *, replace: bool = False) -> int:
        """Export bundles and their signatures to one OCI archive, and return its size in bytes.

        Raises:
            DestinationExistsError: `path` exists and `replace` is false.
        """
        bundles = [self.get(ref) for ref in refs]
        return archive.export_archive(bundles, Path(path), replace=replace)

    def push(self, ref: str, address: str) -> str:
        """Push a bundle to a directory, oci://HOST/NAME[:TAG] or hf://ORG/REPO[:TAG], and return its address by digest.

        Raises:
            RemoteDeniedError, RemoteFailedError: The remote denied the request or failed.
        """
        return remote.push(self.get(ref), address)

    def pull(self, address: str) -> Bundle:
        """Pull a bundle from a directory, a registry or the hub into the store, verify all its digests, and return it.

        Raises:
            RemoteDeniedError, RemoteFailedError: The remote denied the request or failed.
            NotALayoutError: The directory is not a bundle store.
        """
        return remote.pull(self._bundles, address)


def look_up(
    model: str,
    vllm_args: Sequence[str],
    *,
    revision: str | None,
    offline: bool,
    cache_dir: PathLike | None,
    untrusted: bool = False,
) -> BundleLookup:
    """Resolve the model, and look up its bundle. Raises the errors of `resolver.look_up_for_start` and `check_arguments`."""
    accepts = accept_any if untrusted else None
    return resolver.look_up_for_start(
        model,
        check_arguments(vllm_args),
        cache=open_cache(cache_dir),
        offline=offline,
        revision=revision,
        accepts=accepts,
    )


def check_arguments(vllm_args: Sequence[str]) -> Arguments:
    """Convert vLLM arguments to `Arguments`. Raises UsageError if they are one string instead of a sequence."""
    if isinstance(vllm_args, str):
        raise UsageError(
            f"invalid vllm_args {vllm_args!r}: expected a sequence of strings",
            hint=f"use vllm_args={vllm_args.split()}",
        )
    return Arguments(vllm_args)


def open_cache(cache_dir: PathLike | None) -> Cache:
    """Open the cache in `cache_dir`, or the default cache if it is None."""
    return Cache.at(None if cache_dir is None else Path(cache_dir))


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise UsageError if `value` is not in `choices`."""
    if value not in choices:
        raise UsageError(f"invalid {name} {value!r}", hint=f"choose one of: {', '.join(choices)}")
