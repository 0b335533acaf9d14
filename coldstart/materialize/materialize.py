"""`materialize`: the offline phase once, proved by a start from its own result, then published in one step.

Nothing is visible before the last rename, so an interrupted run leaves at most a work directory, which the next run removes.
A bundle whose proof start does not take its fast path, or does not answer the reference tokens, is not published.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from coldstart.artifacts import sign
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.draft import Draft
from coldstart.errors import CommandFailed, Usage
from coldstart.key.inspection import Lookup
from coldstart.machine import criu, paths
from coldstart.materialize import freeze
from coldstart.materialize.assembly import Assembly
from coldstart.materialize.expectation import estimates, of_another
from coldstart.materialize.graphs import Kernels
from coldstart.materialize.progress import Phase
from coldstart.materialize.workspace import workspace
from coldstart.model import models
from coldstart.scheduling import profiling
from coldstart.serve.modes.snapshot import SNAPSHOT

SECTIONS = ("kv", "compile", "graphs", "modelinfo", "tokenizer", "weights", "iterations", "stages")


@dataclass(frozen=True)
class Options:
    """How to materialize. `only` restricts the sections; without `force` an existing bundle for the key is returned.

    `kernels`: CUDA kernels' binaries are copied (value), or named by library, build id and offset (reference).
    `profile_s`: how many seconds the iteration profile may take.
    """

    only: Sequence[str] = ()
    force: bool = False
    snapshot: bool = False
    kernels: Kernels = "value"
    profile_s: float = profiling.BUDGET_S

    def __post_init__(self) -> None:
        if unknown := set(self.only) - set(SECTIONS):
            raise Usage(
                f"There is no section {', '.join(sorted(unknown))}.",
                mend=f"choose among {', '.join(SECTIONS)}",
            )
        if not self.profile_s > 0 or math.isinf(self.profile_s):
            raise Usage(
                f"An iteration profile cannot be given {self.profile_s} seconds.",
                mend="--profile-seconds 120, or fewer for fewer sizes and rounds",
            )

    @property
    def sections(self) -> tuple[str, ...]:
        """The sections to write."""
        return tuple(name for name in SECTIONS if not self.only or name in self.only)


def materialize(requested: Lookup, options: Options, phase: Phase) -> Bundle:
    """Make and publish the bundle; `phase` is entered around each stage for whoever shows progress.

    Raises CommandFailed when the engine or the proof fails, or no snapshot can be taken (asked first); NoSpace, ReadOnlyStore.
    """
    if options.snapshot and (why := SNAPSHOT.unavailable()):
        raise CommandFailed(f"No snapshot can be taken here: {why.reason}.", mend=why.hint)
    if options.snapshot and (reason := criu.missing()) is not None:
        raise CommandFailed(f"No snapshot can be taken here: {reason}.", mend="coldstart doctor")
    with requested.store.lock(requested.key):
        # Looked up again: another process may have made it while this one waited for the lock.
        lookup = requested.again()
        bundle = lookup.bundle
        if bundle is None or options.force:
            bundle = _make(lookup, options, phase)
        if options.snapshot and not bundle.has("snapshot"):
            bundle = freeze.add_snapshot(replace(lookup, bundle=bundle), bundle, phase)
    return bundle


def _make(lookup: Lookup, options: Options, phase: Phase) -> Bundle:
    with phase("weights"):
        model = models.ensure_weights(lookup.model, offline=lookup.offline)
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
