"""`materialize`: the offline phase once, proved by a start from its own result, then published in one step.

Nothing is visible before the last rename, so an interrupted run leaves at most a work directory, which the next run removes.
A bundle whose proof start does not take its fast path, or does not answer the reference tokens, is not published.
"""

from __future__ import annotations

from dataclasses import replace

from coldstart.artifacts import sign
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.draft import Draft
from coldstart.errors import CommandFailedError
from coldstart.launch.modes.snapshot import SNAPSHOT
from coldstart.materialize import freeze
from coldstart.materialize.assembly import Assembly
from coldstart.materialize.expectation import estimates, of_another
from coldstart.materialize.options import SECTIONS, Options
from coldstart.materialize.progress import Phase
from coldstart.materialize.workspace import workspace
from coldstart.models import resolution
from coldstart.models.inspection import Lookup
from coldstart.system import paths
from coldstart.system.snapshot import criu


def materialize(requested: Lookup, options: Options, phase: Phase) -> Bundle:
    """Make and publish the bundle; `phase` is entered around each stage for whoever shows progress.

    Raises CommandFailedError when the engine or the proof fails, or no snapshot can be taken (asked first); NoSpaceError,
    ReadOnlyStoreError.
    """
    if options.snapshot and (why := SNAPSHOT.unavailable()):
        raise CommandFailedError(f"No snapshot can be taken here: {why.reason}.", hint=why.hint)
    if options.snapshot and (reason := criu.missing()) is not None:
        raise CommandFailedError(f"No snapshot can be taken here: {reason}.", hint="coldstart doctor")
    with requested.store.lock(requested.key):
        # Looked up again: another process may have made it while this one waited for the lock.
        lookup = requested.refresh()
        bundle = lookup.bundle
        if bundle is None or options.force:
            bundle = _make(lookup, options, phase)
        if options.snapshot and not bundle.has("snapshot"):
            bundle = freeze.add_snapshot(replace(lookup, bundle=bundle), bundle, phase)
    return bundle


def _make(lookup: Lookup, options: Options, phase: Phase) -> Bundle:
    with phase("weights"):
        model = resolution.ensure_weights(lookup.model, offline=lookup.offline)
    with workspace(lookup.cache.work) as work:
        assembly = Assembly(
            model, lookup.vllm_args, lookup.key.digest, work, phase,
            kernels=options.kernels, profile_s=options.profile_s, estimates=estimates(lookup), others=of_another(lookup),
        )  # fmt: skip
        assembly.run(with_graphs="graphs" in options.sections)
        with phase("publish"), lookup.store.begin(lookup.key) as draft:
            for name in options.sections:
                assembly.add(draft, name)
            if lookup.bundle is not None:
                _take_over(draft, lookup.bundle, set(SECTIONS) - set(options.sections))
            return draft.publish(assembly.provenance(), signer=sign.host_key(paths.state_dir()))


def _take_over(draft: Draft, earlier: Bundle, names: set[str]) -> None:
    """With `only`, the next version has the other sections of the last one: it must not hide them."""
    for name in sorted(names):
        if earlier.has(name):
            draft.keep(earlier, name)
