"""Build the bundle of a model, and find it."""

from __future__ import annotations

from collections.abc import Sequence

from coldstart.api.lookups import PathLike, look_up
from coldstart.artifacts.bundle import Bundle
from coldstart.materialize.options import Options, Phase
from coldstart.materialize.plan import MaterializationPlan
from coldstart.scheduling.profiling import BUDGET_S


def materialize(
    model: str,
    vllm_args: Sequence[str] = (),
    *,
    snapshot: bool = False,
    force: bool = False,
    only: Sequence[str] = (),
    profile_s: float = BUDGET_S,
    graphs: bool = False,
    revision: str | None = None,
    offline: bool = False,
    cache_dir: PathLike | None = None,
    on_progress: Phase | None = None,
) -> Bundle:
    """Build, verify and publish the bundle of a model, or return the existing bundle of its key.

    Args:
        model: Alias, repository id, or directory.
        vllm_args: Command-line arguments of vLLM.
        snapshot: Add a snapshot of a built engine (CRIU).
        force: Build a new version although a bundle exists.
        only: Sections to build; the others are copied from the existing bundle. Empty: all but `graphs`.
        profile_s: Time limit for measuring step latency, in seconds.
        graphs: Also record CUDA graphs.
        revision: Commit, branch or tag of a hub model.
        offline: Download nothing.
        cache_dir: Root of the bundle store; None: COLDSTART_CACHE_DIR, or `coldstart` in XDG_CACHE_HOME.
        on_progress: Called with the name of each stage; returns a context manager that is entered
            while the stage runs and yields a function that takes each finished step.

    Raises:
        UsageError: An option is invalid, or the model does not exist.
        AuthRequiredError: The hub requires authentication, or `offline` forbids a download.
        CommandFailedError: The engine or the verification run failed, or this machine takes no snapshot.
        NoSpaceError: The disk is full.
        ReadOnlyStoreError: The store is not writable.
    """
    options = Options(only, force, snapshot, profile_s, graphs)
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
    """Look up what `materialize` would do, without doing it. Arguments and errors are those of `materialize`."""
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
    """Return the bundle from which `serve` would start this model on this machine, None if there is none.

    Args:
        model: Alias, repository id, or directory.
        vllm_args: Command-line arguments of vLLM.
        revision: Commit, branch or tag of a hub model.
        offline: Download nothing.
        untrusted: Accept a bundle that no trusted key has signed; its code is not used.
        cache_dir: As for `materialize`.

    Raises:
        UsageError: The model does not exist.
        AuthRequiredError: The hub requires authentication, or `offline` forbids a download.
    """
    return look_up(
        model, vllm_args, revision=revision, offline=offline, cache_dir=cache_dir, untrusted=untrusted
    ).bundle
