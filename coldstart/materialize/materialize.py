"""Materialize a model: build its bundle offline, verify it with a test start, and publish it atomically.

Nothing is visible before the final rename, so an interrupted run leaves only a work directory, which the next run
removes. A bundle is not published if the test start uses a fallback or returns a token that differs from the reference.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from coldstart.artifacts import files
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.key import Key
from coldstart.errors import CommandFailedError, UsageError
from coldstart.launch import fetch, prepare, process_snapshot, vllm_snapshot
from coldstart.launch.modes import SNAPSHOT
from coldstart.materialize.options import Options, Phase, no_progress
from coldstart.models import inspection, resolution
from coldstart.models.inspection import BundleLookup
from coldstart.system import fingerprint, paths, probes, runtime
from coldstart.system.snapshot import criu, runtime_image

_PATIENCE_S = 10.0
_FREEZE_S = 600.0
# Gloo would bind the address of this machine's first interface, which a thawed process might not have.
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}


def create_workspace(root: Path) -> AbstractContextManager[Path]:
    """Create the work directory of this run below `root`, and remove the directories of killed runs. Raises OSError."""
    root.mkdir(parents=True, exist_ok=True)
    return files.create_owned_directory(root, patience_s=_PATIENCE_S)


def assemble_bundle(lookup: BundleLookup, options: Options, phase: Phase) -> Bundle:
    """Build the sections of a bundle, verify them with a test start, and publish them."""
    # These modules import numpy and cryptography, which no other use of this module needs.
    from coldstart.artifacts import sign
    from coldstart.materialize.assembly import Assembly

    probes.require_device()
    with phase("weights"):
        model = resolution.ensure_weights(lookup.model, offline=lookup.offline)
    with create_workspace(lookup.cache.unfinished_materializations) as work:
        assembly = Assembly(
            model, lookup.vllm_args, lookup.key.digest, work, phase,
            profile_s=options.profile_s, records=lookup.cache.weights,
        )  # fmt: skip
        assembly.run(with_graphs="graphs" in options.sections)
        if options.faster_graphs and not options.graphs:
            assembly.drop_slow_graphs()
        with phase("publish"), lookup.store.open_draft(lookup.key) as draft:
            for name in options.sections:
                assembly.add_section(draft, name)
            return draft.publish(assembly.build_provenance(), signer=sign.load_host_key(paths.state_dir()))


def has_snapshot(lookup: BundleLookup, bundle: Bundle) -> bool:
    """Return whether this machine has a snapshot of an engine that was started from `bundle`, and can still restore it."""
    if not runtime.targets_cpu():
        return vllm_snapshot.has_snapshot(lookup, bundle)
    image = runtime_image.choose_engine_image_directory(lookup.cache.runtimes, bundle.digest)
    return not (runtime_image.explain_unreadable(image) or fingerprint.find_mismatch(image, "snapshot"))


def add_snapshot(lookup: BundleLookup, bundle: Bundle, phase: Phase) -> None:
    """Start an engine template from `bundle` and create a snapshot of it. On a GPU, vLLM creates the snapshot.

    Raises:
        CommandFailedError: No snapshot can be created on this machine.
    """
    if not runtime.targets_cpu():
        with phase("snapshot by vLLM"):
            vllm_snapshot.create_snapshot(lookup, bundle)
        return
    plan = prepare.plan_with_bundle(
        lookup, bundle, fetch.choose_weights_source(lookup), trust=inspection.trust
    )
    image_dir = runtime_image.choose_engine_image_directory(lookup.cache.runtimes, bundle.digest)
    with phase("freeze a built engine") as say:
        with runtime_image.publish_image(image_dir) as images:
            unshared = process_snapshot.freeze_template(
                replace(plan, env=plan.env | _LOOPBACK), images, _FREEZE_S
            )
        if unshared is not None:
            say(unshared)


@dataclass(frozen=True)
class MaterializationPlan:
    """Model lookup and build options of one materialization."""

    lookup: BundleLookup
    options: Options

    @property
    def key(self) -> Key:
        """Return the key of the bundle."""
        return self.lookup.key

    @property
    def sections(self) -> tuple[str, ...]:
        """Return the names of the sections to build, followed by "snapshot" if it was requested."""
        return (*self.options.sections, *(["snapshot"] if self.options.snapshot else []))

    @property
    def existing(self) -> Bundle | None:
        """Return the trusted bundle with this key, or None if the store has none."""
        return self.lookup.bundle

    def run(self, on_progress: Phase | None = None) -> Bundle:
        """Build and publish the bundle, or return the existing one.

        Args:
            on_progress: Takes the name of a stage and returns a context manager, which is entered while that stage runs. None
                reports no progress.

        Raises:
            CommandFailedError: The engine or the test start failed, or this machine cannot create a snapshot (checked first).
            UsageError: The weight files of a local model are incomplete or do not match their index, or the arguments
                divide a server among several engines or machines (checked first).
            NoSpaceError, ReadOnlyStoreError: The store cannot be written.
        """
        options, phase = self.options, on_progress or no_progress
        for name in ("data_parallel_size", "nnodes"):
            if (count := self.lookup.vllm_args.get_integer(name, 1)) > 1:
                option = f"--{name.replace('_', '-')} {count}"
                reason = f"cannot build a bundle with {option}: its one engine would wait for others"
                raise UsageError(reason, hint="start without a bundle: coldstart serve MODEL --on-miss warn")
        if options.snapshot and (why := SNAPSHOT.find_unusable_reason()):
            raise CommandFailedError(f"cannot create a snapshot: {why.reason}", hint=why.hint)
        if options.snapshot and runtime.targets_cpu() and (limit := criu.find_limit()) is not None:
            raise CommandFailedError(f"cannot create a snapshot: {limit[0]}", hint="run `coldstart doctor`")
        if self.lookup.model.repo_id is None:  # a bundle of the same key may have been built from other files
            resolution.check_weights(self.lookup.model)
        with self.lookup.store.lock_key(self.key):
            # Look up again: another process may have published it while this one waited for the lock.
            lookup = self.lookup.refresh()
            bundle = lookup.bundle
            if bundle is None or options.force:
                bundle = assemble_bundle(lookup, options, phase)
            if options.snapshot and not has_snapshot(lookup, bundle):
                add_snapshot(replace(lookup, bundle=bundle), bundle, phase)
        return bundle
